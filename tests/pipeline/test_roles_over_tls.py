"""A whole run in which every process has a user of its own, by `rolloutmq acl`, and a certificate.

The server knows no other user: `default` is off.
"""

from __future__ import annotations

import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.redis.server.acl import ROLES, user_name
from tests.pipeline.site import Process, Site
from tests.rolloutmq.conftest import in_process
from tests.servers import raw_client
from tests.tls import Authority, start_tls_redis

RQ = ("--set", "tasks.sums.judging.kind=rq", "--set", "launch.judge_workers=1")


@dataclass
class Roles:
    """URLs of all users of the run of `site`, and a client of the server's operator."""

    site: Site
    urls: dict[str, str]
    raw: Any

    def command(self, role: str, *words: str) -> tuple[int, str]:
        """Run a command with the user of a role, in this process; exit code and output."""
        done = in_process(*words, "--run", self.site.name, REDIS_URL=self.urls[role])
        return done.returncode, done.stdout + done.stderr

    def start(self, role: str, verb: str, *more: str) -> Process:
        self.site.url = self.urls[role]
        return self.site.start_words(verb, *more)

    def denied(self) -> set[str]:
        """Return (user: what) of all that the server refused, and forget it."""
        found = {
            f"{entry['username'].removeprefix(self.site.name + '-')}: {entry['object']}"
            for entry in self.raw.acl_log()
        }
        self.raw.acl_log_reset()
        return found


@pytest.fixture
def roles(make_site: Callable[..., Site], tmp_path: Path) -> Iterator[Roles]:
    site = make_site(steps=8, held=1)
    authority = Authority(tmp_path / "authority")
    for name in ("server", *ROLES):
        authority.issue(name)
    secrets = tmp_path / "secrets"
    users = in_process("acl", "--run", site.name, "--secrets", str(secrets)).stdout
    known = dict(line.split(" ") for line in secrets.read_text().splitlines())
    (tmp_path / "users.acl").write_text(
        f"user default off\nuser root on >root ~* &* +@all\n{users}", encoding="utf-8"
    )
    with ExitStack() as stack:
        folder = tmp_path / "server"
        folder.mkdir()
        port = stack.enter_context(
            start_tls_redis(folder, authority, "--aclfile", str(tmp_path / "users.acl"))
        )
        urls = {
            role: authority.url(port, role).replace(
                "://", f"://{user_name(site.name, role)}:{password}@"
            )
            for role, password in known.items()
        }
        root = authority.url(port, "server").replace("://", "://root:root@")
        raw = stack.enter_context(raw_client(root))
        yield Roles(site, urls, raw)
        site.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_process_has_its_own_user_and_certificate(roles: Roles) -> None:
    site = roles.site
    config = (str(site.config), *RQ)
    trainer = roles.start("trainer", "train", *config)
    site.until(lambda: roles.raw.exists(f"rmq:{{{site.name}}}:meta") == 1, "the run")
    workers = [roles.start(role, role, *config) for role in ("producer", "worker", "judge")]
    page = roles.start("viewer", "web", "--run", site.name, "--port", "0")
    site.until_held()
    steer(roles)
    look(roles, page)
    assert roles.command("operator", "resume")[0] == 0
    site.let_go()
    assert trainer.wait() == 0, trainer.said()
    for process in workers[:2]:
        assert process.wait() == 0, process.said()
    assert workers[2].end(signal.SIGTERM) == 0, workers[2].said()
    assert roles.denied() == set(), site.words()
    code, output = roles.command("viewer", "fsck")
    assert code == 0, output
    history = site.history()
    assert [step.step for step in history.steps] == list(range(1, site.steps + 1))
    assert not history.trained_twice()


def steer(roles: Roles) -> None:
    """Do what an operator does; the run is paused afterwards."""
    for words in ("pause", "status", "set max_tries=6", "doctor", "janitor --once", "fsck"):
        code, output = roles.command("operator", *words.split())
        assert code == 0, f"{words}: {output}"
    assert roles.denied() == set()


def look(roles: Roles, page: Process) -> None:
    """Do what a viewer does, and what it may not: the run stays paused."""
    for verb in ("status", "workers", "ls", "dead"):
        code, output = roles.command("viewer", verb)
        assert code == 0, f"{verb}: {output}"
    assert roles.denied() == set()
    address, token = re.search(r"(http://\S+?)/?#token=(\S+)", page.said()).groups()  # type: ignore[union-attr]
    assert ask(f"{address}/api/runs", "")[0] == 401
    assert ask(f"{address}/api/runs", token)[0] == 200
    code, said = ask(f"{address}/api/resume", token, method="POST")
    assert code == 409, said
    code, output = roles.command("viewer", "resume")
    assert code != 0
    assert "Traceback" not in output
    assert roles.denied() != set()


def ask(url: str, token: str, method: str = "GET") -> tuple[int, Any]:
    request = urllib.request.Request(
        url, method=method, headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, orjson.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, orjson.loads(error.read())
