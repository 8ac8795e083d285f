from __future__ import annotations

import asyncio
import inspect
import os
import pickletools
import re
import signal
import subprocess
import sys
import tempfile
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import pytest
import rq
from redis import Redis
from rq.serializers import JSONSerializer

from buffer.errors import ConfigError, JudgeError, Skip
from buffer.failure_text import cause_of, trace_of
from buffer.redis.store import Store
from buffer.redis.url import Servers
from buffer.wire.rollout import RolloutState
from producer_workers.config.task import JudgingSection
from producer_workers.judges import rq_judge
from producer_workers.judges.load import load_judge
from producer_workers.judges.rq_judge import RqJudge
from producer_workers.judges.rq_worker import FIELDS, FUNCTION, judge_url, open_queue
from producer_workers.user_code.failure import failure_text
from tests.pipeline import rq_judges
from tests.pipeline.site import ROOT
from tests.producer_workers.http_service import http_service
from tests.servers import OwnServer, Server
from tests.waits import until

on_one = pytest.mark.parametrize("server", ["valkey"], indirect=True)
"""They say nothing about the server."""

RUN = f"judged-{os.getpid()}"
MINE = "tests.pipeline.rq_judges:"
REWARD = {"score": 4.0, "messages": 1.0, "tokens": 3.5}
NAMES = (
    *("length", "ranks", "skips", "raises", "steps", "hangs_once", "spins", "sleeps", "eats"),
    "ends_without_a_server",
)
TASK = """
[tasks.{name}]
judge = "{mine}{name}"
judging = {{ kind = "rq" }}
dataset = {{ kind = "jsonl", path = "none" }}
"""


@pytest.fixture(scope="module")
def pool(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(server, tmp_path_factory.mktemp("judges"), RUN):
        yield server


@contextmanager
def serving(server: Server, folder: Path, run: str) -> Iterator[subprocess.Popen[bytes]]:
    """`rolloutmq judge` with two workers; at the end it leaves on SIGTERM."""
    config = folder / "run.toml"
    tasks = "".join(TASK.format(name=name, mine=MINE) for name in NAMES)
    tasks += TASK.format(name="python_tests", mine="").replace('"rq"', '"rq", sandbox = "weak"')
    config.write_text(f'[run]\nname = "{run}"\n{tasks}', encoding="utf-8")
    command = [
        sys.executable, "-m", "rolloutmq", "judge", str(config), "--workers", "2", "--redis-url",
        server.url,
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT)
    yield process
    process.send_signal(signal.SIGTERM)
    assert process.wait(400) == 0


@pytest.fixture
def make_judge(pool: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RqJudge]]:
    monkeypatch.setattr(rq_judge, "GRACE_S", 1.5)
    stores = []

    def make(name: str, run: str = RUN, **judging: Any) -> RqJudge:
        stores.append(Store(pool.url, name="judging"))
        return RqJudge(MINE + name, stores[-1], run, JudgingSection(kind="rq", **judging))

    yield make
    for store in stores:
        store.close()


def ask(judge: RqJudge, **fields: Any) -> dict[str, float]:
    return asyncio.run(judge.judge(RolloutState(**fields)))


def is_alive(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def failed(pool: Server, run: str = RUN) -> int:
    return int(open_queue(pool.connect(), run).failed_job_registry.count)


def stored(client: Any) -> Iterator[bytes]:
    """Every value of rq's that might be a document, unpacked."""
    for key in client.scan_iter("rq:*"):
        if client.type(key) == b"hash":
            for name, value in client.hgetall(key).items():
                yield zlib.decompress(value) if name in (b"data", b"exc_info") else value
        elif client.type(key) == b"stream":
            for _, entry in client.xrange(key):
                yield b64decode(entry.get(b"return_value", b""))


def is_pickle(value: bytes) -> bool:
    try:
        return value[:1] == b"\x80" and bool(list(pickletools.genops(value)))
    except ValueError:
        return False


def test_reward_is_that_of_the_same_function_inline_and_no_pickle_is_stored(
    make_judge: Callable[..., RqJudge], pool: Server
) -> None:
    state = RolloutState(
        response="four",
        messages=[{"role": "user", "content": "2 + 2"}],
        extra={"level": [1]},
        response_ids=np.arange(3),
        logprobs=np.zeros(3),
        finish_reason="length",
    )
    inline = asyncio.run(load_judge(MINE + "length").judge_group([state]))[0]
    assert asyncio.run(make_judge("length").judge(state)) == inline == REWARD
    values = list(stored(pool.connect()))
    assert any(b'"four"' in value for value in values)
    assert any(value == b'[{"score": 4.0, "messages": 1.0, "tokens": 3.5}]' for value in values)
    assert not any(is_pickle(value) for value in values)


@on_one
def test_groups_and_programs_are_judged_in_work_horses(pool: Server) -> None:
    with closing(Store(pool.url, name="judging")) as store:
        judging = JudgingSection(kind="rq", retries=0)
        group = [RolloutState(response=text) for text in ("ccc", "a", "bb")]
        ranks = RqJudge(MINE + "ranks", store, RUN, judging, sees_group=True)
        assert asyncio.run(ranks.judge_group(group)) == [
            {"score": 2.0},
            {"score": 0.0},
            {"score": 1.0},
        ]
        programs = RqJudge("python_tests", store, RUN, judging)
        state = RolloutState(
            response="```python\nx = 5\n```", ground_truth=["assert x == 5", "assert x == 6"]
        )
        half = {"score": 0.5, "passed_all": 0.0, "unparsed": 0.0}
        assert asyncio.run(programs.judge(state)) == half


@on_one
def test_a_judge_that_skips_is_asked_once_and_its_job_does_not_fail(
    make_judge: Callable[..., RqJudge], pool: Server
) -> None:
    before = failed(pool)
    with pytest.raises(Skip, match="no page"):
        ask(make_judge("skips", retries=3))
    assert failed(pool) == before


@on_one
def test_a_judge_that_raises_is_known_by_the_users_line(
    make_judge: Callable[..., RqJudge], pool: Server
) -> None:
    with pytest.raises(JudgeError) as raised:
        ask(make_judge("raises", retries=0))
    lines = Path(rq_judges.__file__).read_text().split("\n")
    line = 1 + next(n for n, text in enumerate(lines) if text.endswith("# raises"))
    text = failure_text(raised.value)
    assert cause_of(text) == f"ValueError at rq_judges.py:{line}"
    assert "return float(response)" in trace_of(text)
    assert "rq_worker.py" not in text


def test_pickled_jobs_and_other_functions_are_refused(pool: Server, tmp_path: Path) -> None:
    client = pool.connect()
    before = failed(pool)
    pickled = rq.Queue(f"rmq-judge:{RUN}", connection=client).enqueue(
        "os.mkdir", str(tmp_path / "pickled")
    )
    assert any(
        is_pickle(value) for value in stored(client)
    )  # what the other test looks for can be found
    # as named by the hash, and with arguments of a judge
    other = open_queue(client, RUN).enqueue("os.mkdir", str(tmp_path / "other"))
    foreign = open_queue(client, RUN).enqueue(FUNCTION, "os:mkdir", {}, 1.0, 4096)
    until(lambda: failed(pool) == before + 3)
    assert list(tmp_path.iterdir()) == []
    results = [job.latest_result() for job in (pickled, other, foreign)]
    said = [str(result.exc_string) for result in results if result]
    assert "DeserializationError" in said[0]
    assert "score() missing 3 required positional arguments" in said[1]
    assert "this worker does not run 'os:mkdir'" in said[2]
    pickled.delete()


REFUSED = {
    # names of functions
    "success_callback_name", "failure_callback_name", "stopped_callback_name",
    "success_callback_timeout", "failure_callback_timeout", "stopped_callback_timeout",
    # URLs that rq opens
    "webhooks",
    # other jobs, and other times
    "dependency_id", "dependency_ids", "allow_dependency_failures", "enqueue_at_front", "group_id",
    "number_of_retries", "retries_left", "retry_intervals", "enqueue_at_front_on_retry",
    "repeats_left", "repeat_intervals", "rate_limit_key", "rate_limit_concurrency",
    # what a worker or a program wrote
    "meta", "result", "exc_info", "ttl",
}  # fmt: skip


class Noted(dict[str, Any]):
    """Notes which fields are read."""

    def __init__(self, fields: dict[str, Any], names: set[str]) -> None:
        super().__init__(fields)
        self.names = names

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)


def test_every_field_that_rq_reads_is_one_of_ours_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new rq that reads another field fails here: decide whether a stranger may set it."""
    names: set[str] = set()
    monkeypatch.setattr(rq.job, "decode_redis_hash", lambda fields: Noted(fields, names))
    job = rq.job.Job("x", connection=Redis(), serializer=JSONSerializer)
    job.restore({"data": zlib.compress(b"[]")})
    # the worker and its horse read single fields of the hash, too
    for module in (rq.job, rq.queue, rq.registry, rq.worker.base, rq.worker.worker_classes):
        names |= set(re.findall(r"hm?get\(\s*self\.key, '(\w+)'", inspect.getsource(module)))
    names -= {"current_job", "shutdown_requested_date", "death"}  # of a worker's hash
    assert names >= FIELDS
    assert names - FIELDS <= REFUSED


def touch(job: Any, *_: object) -> None:
    """A callback, which must never be called."""
    (Path(tempfile.gettempdir()) / f"called-{job.id}").touch()


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    def answer(path: str, _: Any) -> tuple[int, bytes]:
        asked.append(path)
        return 200, b""

    with http_service(answer) as url:
        yield url, asked


@on_one
@pytest.mark.parametrize("function", [FUNCTION, "no.such"])
def test_nothing_that_a_job_names_is_called(pool: Server, tmp_path: Path, function: str) -> None:
    client = pool.connect()
    queue = open_queue(client, RUN)
    rollout = {"response": "four", "ground_truth": None}
    with listening() as (url, asked), closing(Store(pool.url, name="judging")) as store:
        hooks = [
            {"url": f"{url}/{end}", "job_status": end, "method": "POST"}
            for end in ("finished", "failed")
        ]
        values = dict.fromkeys(REFUSED, "1") | {"webhooks": orjson.dumps(hooks).decode()}
        values |= dict.fromkeys(
            [name for name in REFUSED if name.endswith("_callback_name")], f"{__name__}.touch"
        )
        jobs = []
        for name, value in values.items():
            job = queue.create_job(
                function,
                job_id=f"rmq-judge-{RUN}_-{name}-{os.getpid()}",
                args=(MINE + "length", [rollout], 60.0, 1 << 20),
            )
            job.save()
            client.hset(job.key, name, value)
            client.rpush(queue.key, job.id)
            jobs.append(job)
        judge = RqJudge(MINE + "length", store, RUN, JudgingSection(kind="rq", retries=9))
        for _ in range(4):  # by both workers, whatever these did before
            assert ask(judge, response="four")["score"] == 4.0
        until(lambda: not client.exists(queue.key))
        assert ask(judge, response="four")["score"] == 4.0
        assert asked == []
    for job in jobs:
        assert not (Path(tempfile.gettempdir()) / f"called-{job.id}").exists()
        assert not client.exists(f"{job.key}:results"), "it was refused before it ran"
        client.delete(job.key)


POISON: dict[str, Callable[[Any, str], Any]] = {
    "no hash": lambda client, key: client.set(key, "x"),
    "nothing": lambda client, key: None,
    "no data": lambda client, key: client.hset(key, "status", "queued"),
    "not packed": lambda client, key: client.hset(key, "data", "[]"),
    "a bomb": lambda client, key: client.hset(key, "data", zlib.compress(bytes(1 << 29))),
    "a wrong number": lambda client, key: client.hset(
        key, mapping={"data": zlib.compress(b"[]"), "timeout": "soon"}
    ),
    "a wrong date": lambda client, key: client.hset(
        key, mapping={"data": zlib.compress(b"[]"), "created_at": "soon"}
    ),
    "a field without a name": lambda client, key: client.hset(
        key, mapping={"data": zlib.compress(b"[]"), b"\xff": "x"}
    ),
}


@on_one
@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
def test_what_is_no_job_ends_no_worker(pool: Server, poison: Callable[[Any, str], Any]) -> None:
    client = pool.connect()
    queue = open_queue(client, RUN)
    before = {worker.name for worker in rq.Worker.all(queue=queue)}
    names = [f"rmq-judge-{RUN}_-poison-{n}" for n in range(4)]
    for name in names:
        poison(client, f"rq:job:{name}")
        client.rpush(queue.key, name)
    with closing(Store(pool.url, name="judging")) as store:
        judge = RqJudge(MINE + "length", store, RUN, JudgingSection(kind="rq", retries=9))
        assert ask(judge, response="four")["score"] == 4.0
    until(lambda: not client.exists(queue.key))
    assert {worker.name for worker in rq.Worker.all(queue=queue)} == before
    client.delete(*(f"rq:job:{name}" for name in names), queue.intermediate_queue_key)


@on_one
def test_a_list_that_holds_what_is_no_job_ends_no_worker_at_its_start(
    server: Server, run_name: str, tmp_path: Path
) -> None:
    """A worker cleans rq's lists first: it would end at every start."""
    client = server.connect()
    queue = open_queue(client, run_name)
    client.rpush(queue.intermediate_queue_key, b"\xff")
    client.zadd(queue.started_job_registry.key, {b"\xff": 1})
    with serving(server, tmp_path, run_name), closing(Store(server.url, name="judging")) as store:
        judge = RqJudge(MINE + "length", store, run_name, JudgingSection(kind="rq", retries=0))
        assert ask(judge, response="four")["score"] == 4.0
        pattern = f"rq:worker:{queue.name}:*"
        until(lambda: len([*client.scan_iter(pattern)]) == 2)
        workers = [*client.scan_iter(pattern)]
        until(
            lambda: all(
                client.hget(k, "state") == b"idle" or client.hexists(k, "death") for k in workers
            )
        )
        assert not any(client.hexists(key, "death") for key in workers)
    for key in client.scan_iter(f"rq:*{run_name}*"):
        client.delete(key)


@on_one
@pytest.mark.parametrize(
    ("name", "limits", "reason"),
    [
        ("sleeps", {"timeout_s": 1.0}, "exceeded its limit of 1 s"),
        ("spins", {"timeout_s": 1.0}, "signal 9"),
        ("eats", {"memory_mb": 2048}, "MemoryError"),
    ],
)
def test_judge_is_ended_when_it_is_over_a_limit(
    make_judge: Callable[..., RqJudge],
    pool: Server,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    limits: dict[str, float],
    reason: str,
) -> None:
    monkeypatch.setattr(rq_judge, "GRACE_S", 400.0)  # the limits end it, not the one who waits
    before = failed(pool)
    with pytest.raises(JudgeError, match=reason):
        ask(make_judge(name, retries=0, **limits))
    assert failed(pool) == before + 1


@on_one
@pytest.mark.parametrize("victims", [("horse",), ("worker", "horse")])
def test_judge_is_asked_again_when_its_processes_are_killed(
    make_judge: Callable[..., RqJudge], tmp_path: Path, victims: tuple[str, ...]
) -> None:
    async def scene() -> dict[str, float]:
        # without its worker nobody ends the job: it is repeated once its time is over
        timeout_s = 1.0 if "worker" in victims else 400.0
        judge = make_judge("hangs_once", timeout_s=timeout_s, retries=100)
        judging = asyncio.create_task(judge.judge(RolloutState(ground_truth=str(tmp_path))))
        await asyncio.to_thread(until, (tmp_path / "pid").exists)
        horse, worker = map(int, (tmp_path / "pid").read_text().split())
        for victim in victims:
            os.kill({"horse": horse, "worker": worker}[victim], signal.SIGKILL)
        return await judging

    assert asyncio.run(scene()) == {"score": 1.0}


@on_one
async def test_a_job_is_queued_again_at_once_when_its_worker_died_before_it_began(
    make_judge: Callable[..., RqJudge], pool: Server, run_name: str
) -> None:
    """Without a retry, and long before its time is over."""
    client = pool.connect()
    queue = open_queue(client, run_name)
    judge = make_judge("length", run_name, timeout_s=4000.0, retries=0)
    judging = asyncio.create_task(judge.judge(RolloutState()))
    await asyncio.to_thread(until, lambda: queue.count == 1)
    lost = client.lmove(queue.key, queue.intermediate_queue_key, "LEFT", "RIGHT")
    await asyncio.to_thread(until, lambda: queue.count == 1)
    assert queue.get_job_ids() == [lost.decode()]
    assert not client.exists(queue.intermediate_queue_key)
    judging.cancel()
    await asyncio.to_thread(
        until, lambda: queue.count == 0
    )  # not waited for any more, so not judged


def test_a_job_runs_again_at_once_when_its_worker_loses_the_server(tmp_path: Path) -> None:
    """Without a retry, and long before its time is over."""
    own = OwnServer("valkey", tmp_path / "server")
    durable = ("--appendonly", "yes", "--appendfsync", "always")
    own.start(*durable)

    async def scene(serving: psutil.Process) -> dict[str, float]:
        judging = JudgingSection(kind="rq", timeout_s=400.0, retries=0)
        with closing(Store(own.url, name="judging")) as store:
            judge = RqJudge(MINE + "ends_without_a_server", store, RUN, judging)
            asked = asyncio.create_task(judge.judge(RolloutState(ground_truth=str(tmp_path))))
            await asyncio.to_thread(until, (tmp_path / "called").exists)
            workers = serving.children()
            own.kill()
            (tmp_path / "away").touch()
            await asyncio.to_thread(until, lambda: not all(map(is_alive, workers)))
            own.start(*durable)
            return await asked

    try:
        with serving(Server("valkey", own.url), tmp_path, RUN) as process:
            assert asyncio.run(scene(psutil.Process(process.pid))) == {"score": 1.0}
    finally:
        own.kill()


def test_judge_workers_that_cannot_work_end_their_pool_with_the_cause(
    server: Server, tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    text = TASK.format(name="length", mine=MINE)
    config.write_text(f'[run]\nname = "{RUN}-x"\n{text}', encoding="utf-8")
    with server.connect() as client:
        client.acl_setuser(
            "idler",
            enabled=True,
            passwords=["+pw"],
            keys=["*"],
            commands=["+ping", "+info", "+client", "+hello", "+config|get", "+time"],
        )
        url = f"{server.url.replace('://', '://idler:pw@')}"
        words = ["judge", str(config), "--workers", "2", "--redis-url", url]
        ended = subprocess.run([sys.executable, "-m", "rolloutmq", *words], cwd=ROOT, check=False,
                               capture_output=True, text=True, timeout=400)  # fmt: skip
        client.acl_deluser("idler")
    assert ended.returncode == 1
    assert "judge workers ended within 60 s" in ended.stderr
    assert "no permissions" in ended.stderr.lower()


def test_cluster_is_refused_with_what_to_set() -> None:
    class Cluster(Servers):
        is_cluster = True

    servers = Cluster("redis://127.0.0.1:1", "judging")
    with pytest.raises(ConfigError, match=r"\[judges\] redis_url"):
        judge_url(None, servers)
    assert judge_url("redis://other", servers) == "redis://other"


@on_one
def test_token_columns_of_a_judge_in_a_job_are_given_to_the_rollout(
    make_judge: Callable[..., RqJudge],
) -> None:
    state = RolloutState(response_ids=np.array([3, 4]), logprobs=[0, 0])
    assert asyncio.run(make_judge("steps").judge(state)) == {"score": 1.0}
    assert state.token_rewards is not None
    assert state.token_rewards.tolist() == [1.5, 2.0]
