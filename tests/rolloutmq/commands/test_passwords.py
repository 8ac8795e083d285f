"""A password in REDIS_URL is seen nowhere: not in what any command prints when it fails, nor when
it looks at a run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.url import mask_url
from tests.rolloutmq.conftest import ROOT, Command
from tests.rolloutmq.populate import Scene

SECRET = "hunter22"
URLS = (
    f"redis://u:{SECRET}@127.0.0.1:1/0",
    f"u:{SECRET}@127.0.0.1:1",
    f"redis://u:{SECRET}@127.0.0.1:1/0?nonsense=1",
)

CONFIG = str(ROOT / "configs" / "demo.toml")
PATIENT = ("train", "producer", "worker")
"""Commands that wait a minute for a server."""
COMMANDS = {name: (name, CONFIG) for name in PATIENT} | {
    "show": ("show", "math-0000000001"),
    "save": ("save", "/nowhere"),
    **{name: (name,) for name in ("status", "doctor", "runs", "metrics", "web")},
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_shows_it_when_the_server_is_not_there(
    name: str, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROLLOUTMQ_DEBUG", "1")
    for url in URLS[1:] if name in PATIENT else URLS:
        monkeypatch.setenv("REDIS_URL", url)
        done = command(*COMMANDS[name], cwd=tmp_path)
        assert done.returncode in (2, 3), done.stderr
        assert "***@" in done.stderr
        assert SECRET not in done.stdout + done.stderr


def test_no_command_shows_it_of_a_server_that_is_there(
    scene: Scene,
    server: EmbeddedServer,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    scene.run.store.client.execute_command(
        "ACL", "SETUSER", "u", "on", f">{SECRET}", "~*", "&*", "+@all"
    )
    monkeypatch.setenv("REDIS_URL", server.url.replace("unix://", f"unix://u:{SECRET}@"))
    for name in ("status", "doctor", "workers", "runs", "ls", "fsck", "dead", "metrics"):
        done = command(name, *(() if name == "runs" else ("--run", scene.run.name)), cwd=tmp_path)
        assert done.returncode in (0, 1), (name, done.stderr)
        assert SECRET not in done.stdout + done.stderr, name
    monkeypatch.setenv("REDIS_URL", server.url.replace("unix://", f"unix://u:{SECRET}x@"))
    done = command("status", cwd=tmp_path)
    assert done.returncode == 3
    assert SECRET not in done.stdout + done.stderr


@given(before=st.sampled_from(["redis://", "rediss://", "unix://", "redis+sentinel://", "redis//", "", "at "]),
       user=st.from_regex(r"[a-z]{0,5}", fullmatch=True),
       password=st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="'\""), min_size=6),
       host=st.sampled_from(["h", "h:6379/0", "[::1]:1,b:2/s?x=1"]))  # fmt: skip
def test_a_masked_text_holds_no_password(before: str, user: str, password: str, host: str) -> None:
    assert password not in mask_url(f"{before}{user}:{password}@{host}") or password in "***@h:6379"
    assert (
        password not in mask_url(f"redis://{host}?password={password}".replace("&", ""))
        or "&" in password
    )
