"""Users of `rolloutmq acl` on real servers: each role can do all of its work, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
from rq.serializers import JSONSerializer

from buffer.config.assignments import parse_settings
from buffer.control.control import Mode
from buffer.errors import StoreUnavailable
from buffer.redis.server.acl import ROLES, acl_line, user_name
from buffer.redis.server.check import require_all_safe
from buffer.redis.store import Store
from buffer.run.open import can_wait_for_disk
from buffer.run.run import Run
from buffer.run.settings import LiveSettings
from buffer.wire.rollout import PolicyVersion, RolloutState
from producer_workers.judges.judge import rollout_fields
from producer_workers.judges.rq_worker import FUNCTION, JudgeJob, JudgeWorker, open_queue
from rolloutmq.views.run_view import read_run_view
from tests.buffer.scene import Scene
from tests.rolloutmq.conftest import rolloutmq
from tests.servers import SAFE, Server, raw_client, start_redis, start_server

PASSWORD = "only for this test"


class Site:
    """One run, seen by a user of every role. `scene` acts as whoever it is told to."""

    def __init__(self, server: Server, name: str, stack: ExitStack) -> None:
        self.raw: Any = stack.enter_context(server.connect())
        self.url = server.url
        self.name = name
        for role in ROLES:
            self.raw.execute_command("ACL", "SETUSER", *words(acl_line(name, role, PASSWORD)))
        store = self.store("trainer")
        self.scene = Scene(store, self.raw, name)
        self.runs = {role: Run.open(self.store(role), name) for role in ROLES if role != "judge"}

    def login(self, role: str) -> str:
        return login_of(self.url, self.name, role)

    def store(self, role: str) -> Store:
        store = Store(self.login(role), deadline_s=5.0)
        if role not in ("viewer", "judge"):
            require_all_safe(store.servers)
            store.waits_for_disk = can_wait_for_disk(store)
        return store

    def acting(self, role: str) -> Scene:
        self.scene.run = self.runs[role]
        return self.scene

    def denied(self) -> list[str]:
        """Return what users were refused."""
        return [f"{entry['username']}: {entry['object']}" for entry in self.raw.acl_log()]


def login_of(url: str, run: str, role: str) -> str:
    """Return the URL of the server at `url` for the user of a role."""
    return url.replace("unix://", f"unix://{user_name(run, role)}:{quote(PASSWORD)}@")


def words(line: str) -> list[str]:
    """Return the arguments of ACL SETUSER for a line of an ACL file."""
    return re.findall(r"\([^)]*\)|\S+", line.removeprefix("user "))


@pytest.fixture(params=["valkey", "redis"])
def site(request: pytest.FixtureRequest, tmp_path: Path, run_name: str) -> Iterator[Site]:
    with ExitStack() as stack:
        server = stack.enter_context(start_server(request.param, tmp_path / "server"))
        site = Site(server, run_name, stack)
        yield site
        for run in site.runs.values():
            run.store.close()


def work(site: Site) -> None:
    """Run from the first prompt to a commit, each part by its role."""
    site.acting("trainer").open_trainer()
    producer = site.acting("producer")
    producer.enqueue(8)
    worker = site.acting("worker")
    done, failed, back, aborted, *others = worker.claim(8)
    worker.beat([done, failed])
    worker.submit(done)
    worker.run.jobs.release("w0", failed, "failed", "bad")
    worker.run.jobs.release("w0", back, "handback")
    worker.run.jobs.release("w0", aborted, "aborted")
    for job in others:
        worker.submit(job)
    worker.run.janitor.sweep(files=False, archive=False)
    producer = site.acting("producer")
    producer.run.jobs.reissue(producer.producer, "math", "aborted", 1000)
    trainer = site.acting("trainer")
    entries = trainer.take(1, math=3).entries
    trainer.run.ledger.quarantine(trainer.trainer, 1, entries[0], "not good")
    trainer.run.buffer.read_many([entry.payload for entry in entries[1:]])
    trainer.run.control.set_mode("trainer", Mode.KEEP, nonce=trainer.trainer)
    trainer.run.control.publish_weights(trainer.trainer, PolicyVersion("l1", 1), "/w/1", "sum")
    trainer.run.control.set_mode("trainer", Mode.RUN, nonce=trainer.trainer)
    trainer.run.ledger.commit(trainer.trainer, 1, 1)
    site.acting("producer").run.janitor.sweep()
    look(site.runs["viewer"])
    steer(site, entries[0].gid)


def look(run: Run) -> None:
    """Do what a viewer does."""
    assert run.account.fsck().clean
    read_run_view(run)
    assert run.groups.find({"stage": "waiting"}, limit=5)
    run.buffer.count_statuses()
    run.fleet.workers()


def steer(site: Site, dead: str) -> None:
    run = site.acting("operator").run
    run.control.set_mode("operator", Mode.DRAIN)
    run.control.set_mode("operator", Mode.RUN)
    assert run.jobs.requeue(dead) == "dead"
    assert run.jobs.drop(dead) == "waiting"
    run.set(parse_settings(LiveSettings, ["max_tries=5"]))
    run.fleet.fence("w0")
    run.janitor.sweep()
    assert run.account.fsck().clean


def test_each_role_can_do_its_work(site: Site) -> None:
    work(site)
    assert site.denied() == []


def test_a_worker_in_a_process_of_its_own_is_denied_nothing(site: Site) -> None:
    """The channel of hints, as the heart listens to it."""
    with raw_client(site.login("worker")) as client, client.pubsub() as channel:
        channel.subscribe(site.scene.keys.control)
        site.acting("trainer").open_trainer()
        site.scene.run.control.set_mode("trainer", Mode.DRAIN, nonce=site.scene.trainer)
        kinds = [channel.get_message(timeout=400.0) for _ in range(2)]
        assert [kind and kind["type"] for kind in kinds] == ["subscribe", "message"]
    assert site.denied() == []


def test_scripts_that_the_server_lost_are_loaded_by_a_role_that_may(site: Site) -> None:
    """All of them: those of a worker, too, which waits for that."""
    site.acting("trainer").open_trainer()
    site.acting("producer").enqueue(1)
    site.raw.script_flush()
    worker = site.runs["worker"]
    worker.store.deadline_s = 0.0
    with pytest.raises(StoreUnavailable, match="may not load"):
        worker.janitor.sweep(files=False, archive=False)
    site.acting("producer").run.janitor.sweep()
    worker.store.deadline_s = 400.0
    assert site.acting("worker").claim(1)


def test_a_judge_sees_its_queue_and_nothing_of_the_run(site: Site) -> None:
    """Of the names of other applications nothing is changed either, nor of the lists of all."""
    site.raw.sadd("rq:workers", "rq:worker:theirs")
    before = {key: site.raw.dump(key) for key in site.raw.keys("rq:*")}
    keys = site.scene.keys
    judge = "tests.pipeline.rq_judges:length"
    rollout = rollout_fields(RolloutState(response="four"))
    with raw_client(site.login("worker")) as asking, raw_client(site.login("judge")) as client:
        ours = open_queue(asking, site.name)
        # the work-horse is a fork of this process, which may have torch and other tests in it
        unlimited_mb = 1 << 20
        job = ours.create_job(
            FUNCTION, args=(judge, [rollout], 60.0, unlimited_mb), job_id=keys.judge_jobs + "1"
        )
        ours.enqueue_job(job)
        asking.rpush(ours.key, "4ddc3b5e")  # another application's job
        site.raw.sadd(f"rq:workers:{ours.name}", f"rq:worker:{ours.name}:killed")
        JudgeJob.judges = {judge: "bubblewrap"}
        JudgeWorker(
            [open_queue(client, site.name, job_class=JudgeJob)],
            name=f"{ours.name}:host",
            connection=client,
            job_class=JudgeJob,
            serializer=JSONSerializer,
        ).work(burst=True, logging_level="ERROR")
        result = job.latest_result()
        assert result
        answer: Any = result.return_value
        assert answer[0]["score"] == 4.0, result.exc_string
        assert {entry.partition(": ")[2] for entry in site.denied()} <= {"rq:job:4ddc3b5e"}
        assert not site.raw.exists(f"rq:workers:{ours.name}")
        assert {key: site.raw.dump(key) for key in before} == before
        assert not site.raw.exists("rq:queues")
        job.delete()
        for command in (
            ("HGETALL", site.scene.keys.meta),
            ("LPUSH", site.scene.keys.wake_up("workers"), "x"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)


def test_printed_file_is_one_that_a_server_loads(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    made = rolloutmq("acl", "--run", "demo", "--secrets", str(secrets))
    assert made.returncode == 0, made.stderr
    assert secrets.stat().st_mode & 0o077 == 0
    passwords = dict(line.split(" ") for line in secrets.read_text().splitlines())
    assert not any(password in made.stdout for password in passwords.values())
    assert rolloutmq("acl", "--run", "demo", "--secrets", str(secrets)).stdout == made.stdout
    (tmp_path / "users.acl").write_text(made.stdout, encoding="utf-8")
    with start_redis(tmp_path / "redis", *SAFE, "--aclfile", str(tmp_path / "users.acl")) as url:
        for role, password in passwords.items():
            login = url.replace("unix://", f"unix://{user_name('demo', role)}:{password}@")
            with raw_client(login) as client:
                assert client.ping()


def test_a_file_of_passwords_is_private(tmp_path: Path) -> None:
    open_to_all = tmp_path / "secrets"
    open_to_all.write_text("worker hunter22\n")
    open_to_all.chmod(0o644)
    refused = rolloutmq("acl", "--run", "demo", "--secrets", str(open_to_all))
    assert refused.returncode == 2
    assert "chmod 600" in refused.stderr
    assert "hunter22" not in refused.stderr
