"""What every rollout worker must do (producer_workers/PROTOCOL.md), in whatever language.

Tried with ours and two that share no code with the project (`tests/foreign`, in Python and in
JavaScript), as processes, on a real server. The one in JavaScript needs Node.js, and two libraries
that `make test-foreign` installs.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest

from buffer.control.control import Mode
from buffer.wire.rollout import PolicyVersion
from tests import waits
from tests.pipeline.held_run import Hold
from tests.pipeline.site import ROOT
from tests.pipeline.yard import FIRST, LINEAGE, SOME, WatchedEngine, Yard, versions
from tests.waits import DEADLINE_S

ALL = 1 << 40

FOREIGN = ROOT / "tests" / "foreign"
INSTALLED = ROOT / "build" / "foreign"
"""Workers that import nothing of this project, and where the libraries of the one in JavaScript
are.
"""


LetGo = Callable[[], object]
"""Lets a held worker make all tokens that it was asked for."""


class Launch(Protocol):
    """Starts a worker; leaving the context stops it in order, and waits for its end.

    A `held` one makes SOME tokens of a response at most until it is let go.
    """

    def __call__(self, yard: Yard, *, held: bool = False) -> AbstractContextManager[LetGo]: ...


def until(yard: Yard, condition: Callable[[], bool]) -> None:
    def met() -> bool:
        yard.run.janitor.sweep()  # as a producer does
        return condition()

    waits.until(met)


@contextmanager
def ours(yard: Yard, *, held: bool = False) -> Iterator[LetGo]:
    loop = asyncio.new_event_loop()
    worker = yard.worker(held=held, drain_timeout_s=30.0)
    engine: WatchedEngine = worker.engine  # type: ignore[attr-defined]
    stop, failures = asyncio.Event(), []

    async def work() -> None:
        async with yard.working(worker):
            await stop.wait()

    def live() -> None:
        try:
            loop.run_until_complete(work())
        except BaseException as error:  # raised where the test waits
            failures.append(error)
        finally:
            loop.close()

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield partial(loop.call_soon_threadsafe, engine.let_go)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert not failures


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign") / "scripts.json"
    with path.open("wb") as file:
        subprocess.run(
            [sys.executable, "-m", "buffer.redis.script_list"], cwd=ROOT, stdout=file, check=True
        )
    return path


foreign = pytest.mark.parametrize("launch", ["python", "node"], indirect=True)
each_worker = pytest.mark.parametrize("launch", ["ours", "python", "node"], indirect=True)
"""Ours is tried by the rest of this folder; here, only where that costs little."""


def program(language: str, *args: str) -> list[str]:
    """Return a foreign worker's command; skip the test if it cannot run here."""
    if language == "python":
        # -I: neither this folder nor PYTHONPATH; what it imports is installed
        return [sys.executable, "-I", str(FOREIGN / "worker.py"), *args]
    node = shutil.which("node")
    if node is None or not (INSTALLED / "node_modules").is_dir():
        pytest.skip("no Node.js with ioredis and @msgpack/msgpack: make test-foreign installs them")
    return [node, str(shutil.copy(FOREIGN / "worker.mjs", INSTALLED)), *args]


def url_of(yard: Yard) -> str:
    return str(yard.store.servers.masters()[0][0])


@pytest.fixture
def launch(request: pytest.FixtureRequest, scripts: Path) -> Launch:
    if request.param == "ours":
        return ours

    @contextmanager
    def start(yard: Yard, *, held: bool = False) -> Iterator[LetGo]:
        hold = Hold(yard.folder / "hold")
        hold.allow(SOME if held else ALL)
        args = (url_of(yard), yard.run.name, str(scripts), "w0", str(hold.file))
        process = subprocess.Popen(program(request.param, *args))
        try:
            yield partial(hold.allow, ALL)
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            process.wait()

    program(request.param)
    return start


def test_foreign_worker_imports_nothing_of_this_project() -> None:
    text = (FOREIGN / "worker.py").read_text(encoding="utf-8")
    imported = {
        line.split()[1].partition(".")[0]
        for line in text.splitlines()
        if line.startswith(("import", "from"))
    }
    assert imported - set(sys.stdlib_module_names) == {"msgpack", "redis"}
    script = (FOREIGN / "worker.mjs").read_text(encoding="utf-8")
    imported = {line.split('"')[1] for line in script.splitlines() if line.startswith("import")}
    assert {name for name in imported if not name.startswith("node:")} == {
        "@msgpack/msgpack",
        "ioredis",
    }


@each_worker
def test_worker_claims_generates_and_submits_groups_of_any_size(yard: Yard, launch: Launch) -> None:
    small = yard.enqueue(3, tokens=(7, 7))
    large = yard.enqueue(1, tokens=(3,) * 9)
    with launch(yard):
        until(yard, lambda: yard.stages() == {"completed": 4})
    for gid in small + large:
        group = yard.group(gid)
        assert {len(state.response_ids) for state in group.states} == ({7} if gid in small else {3})
        for state in group.states:
            assert versions(state) == [FIRST] * len(state.response_ids)
            assert state.reward is not None
            assert state.status.value == "completed"
    assert {record["tries"] for record in yard.records()} == {"0"}
    assert not yard.run.fleet.workers(), "it has said good-bye"
    assert yard.counters()["produced_tokens"] == 3 * 14 + 27
    yard.check()


@foreign
def test_worker_keeps_its_lease_with_heartbeats_while_it_generates_for_longer(
    yard: Yard, launch: Launch
) -> None:
    yard.enqueue(1, tokens=(50, 50))
    with launch(yard, held=True):
        until(yard, lambda: yard.stages() == {"running": 1})
        asyncio.run(yard.until_renewed())
        assert yard.leases() == 1
        yard.run.receipts.wait(yard.control(Mode.ABORT), timeout_s=DEADLINE_S)
    assert yard.counters().get("leases_lost", 0) == 0
    yard.check()


@each_worker
def test_worker_releases_what_it_holds_in_an_abort_and_confirms(yard: Yard, launch: Launch) -> None:
    yard.enqueue(6, tokens=(50, 50))  # more than it holds at once
    with launch(yard, held=True):
        until(yard, lambda: yard.leases() > 0)
        yard.run.receipts.wait(yard.control(Mode.ABORT), timeout_s=DEADLINE_S)
        assert yard.leases() == 0
        places = yard.stages()
        assert places.get("aborted", 0) >= 1
        assert places == {"aborted": places["aborted"], "waiting": 6 - places["aborted"]}
        asyncio.run(yard.until_idle())  # it could have claimed what waits
        assert yard.stages() == places
        yard.run.receipts.wait(yard.control(Mode.RUN), timeout_s=DEADLINE_S)
        until(yard, lambda: yard.leases() > 0)
        yard.run.receipts.wait(yard.control(Mode.ABORT), timeout_s=DEADLINE_S)
    assert {record["tries"] for record in yard.records()} == {"0"}
    yard.check()


@foreign
def test_worker_freezes_and_continues_with_new_weights(yard: Yard, launch: Launch) -> None:
    (gid,) = yard.enqueue(1, tokens=(50,))
    with launch(yard, held=True) as let_go:
        until(yard, lambda: yard.leases() == 1)
        asyncio.run(yard.until_idle())  # between two heartbeats it makes a token
        yard.run.receipts.wait(yard.control(Mode.KEEP), timeout_s=DEADLINE_S)
        yard.publish(1)
        yard.run.receipts.wait(yard.control(Mode.RUN), timeout_s=DEADLINE_S)
        let_go()
        until(yard, lambda: yard.stages() == {"completed": 1})
    stamps = [stamp for state in yard.group(gid).states for stamp in versions(state)]
    assert set(stamps) == {FIRST, PolicyVersion(LINEAGE, 1)}
    assert stamps[-1] == PolicyVersion(LINEAGE, 1)
    assert (yard.records()[0]["version"], yard.records()[0]["tries"]) == ("0", "0")
    yard.check()


@each_worker
def test_worker_that_lost_its_lease_changes_nothing(yard: Yard, launch: Launch) -> None:
    (gid,) = yard.enqueue(1, tokens=(50,))
    with launch(yard, held=True) as let_go:
        until(yard, lambda: yard.leases() == 1)
        old = yard.run.record(gid)["token"]
        assert yard.run.fleet.fence("w0") == 1
        let_go()
        # it joins again, and makes the group under another token
        until(yard, lambda: yard.stages() == {"completed": 1})
        assert yard.run.record(gid)["payload"] not in (old, "init")
    assert yard.counters()["leases_lost"] == 1
    assert yard.counters()["produced_samples"] == 1
    yard.check()


@foreign
def test_leases_of_a_killed_worker_run_out_and_another_makes_its_groups(
    make_yard: Callable[..., Yard], scripts: Path, launch: Launch, request: pytest.FixtureRequest
) -> None:
    yard = make_yard(lease_ms=1500, worker_timeout_ms=4500)
    yard.enqueue(2, tokens=(50, 50))
    language = request.node.callspec.params["launch"]
    hold = Hold(yard.folder / "victim")
    hold.allow(SOME)
    args = (url_of(yard), yard.run.name, str(scripts), "victim", str(hold.file))
    victim = subprocess.Popen(program(language, *args))
    until(yard, lambda: yard.leases() == 1)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    with launch(yard):
        until(yard, lambda: yard.stages() == {"completed": 2})
    assert yard.counters()["leases_lost"] >= 1
    yard.check()


@foreign
def test_what_a_prompt_carries_comes_back_as_it_was(yard: Yard, launch: Launch) -> None:
    """Decode and encode in another language, which knows other numbers."""
    carried = {
        "id": 2**60 + 1, "least": -(2**63), "share": 0.1, "whole": 2.0, "text": "\u20ac\0",
        "none": None,
    }  # fmt: skip
    (gid,) = yard.enqueue(1, tokens=(3,), extra=carried)
    with launch(yard):
        until(yard, lambda: yard.stages() == {"completed": 1})
    assert yard.group(gid).states[0].extra == carried
    assert yard.group(gid).states[0].ground_truth == gid
    yard.check()
