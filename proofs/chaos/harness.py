"""One chaos run from its first process to its verdict."""

from __future__ import annotations

import logging
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from buffer.ids import new_nonce
from buffer.limits import RunLimits
from buffer.redis.store import Store
from buffer.run.run import Run
from proofs.chaos.checker import Checker, Rules, Verdict
from proofs.chaos.crew import Crew, until
from proofs.chaos.failover_nemesis import FailoverNemesis
from proofs.chaos.faulty_link import Wiring
from proofs.chaos.final_look import look
from proofs.chaos.history import Event, History, parse, read_history
from proofs.chaos.nemesis import Nemesis
from proofs.chaos.plan import (
    LEASE_MS,
    LOST,
    ROWS,
    RUN,
    SERVER,
    SYNC_INTERVAL,
    Folders,
    limits,
    question,
)
from proofs.chaos.replicated import ClusterServers, Replicated, WatchedServers
from proofs.chaos.server_nemesis import ServerNemesis
from proofs.chaos.stepped_server import SteppedServer
from proofs.chaos.token_account import read_account
from proofs.truth.witness import digest
from tests.pipeline.yard import Letters

log = logging.getLogger("rolloutmq.chaos")

RECOVER_S = 240.0
"""After the last fault: a bound for the run to go on, and then to end."""

MUTANT_S = 20.0
"""The same of a build that shall be caught: that it stands still is found as well as anything."""

SERVERS: dict[str, Callable[[Path], SteppedServer | Replicated]] = {
    "single": SteppedServer,
    "sentinel": WatchedServers,
    "cluster": ClusterServers,
}
LOOK_S = 0.05
TAIL_BYTES = 40_000
"""Of a trainer's history: more than one step."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, and how hard. `fsync`: of the server, whose file may lose its end if it `loses`."""

    seed: int
    seconds: float
    faults: int
    workers: int = 3
    fsync: str = "always"
    loses: bool = False
    mutation: str = ""
    servers: str = "single"
    wait_replicas: int = 0


class ChaosRun:
    """One run in `folder`, which must be new."""

    def __init__(self, plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._recover_s = MUTANT_S if plan.mutation else RECOVER_S
        self._nonce = new_nonce()
        self.folders = Folders(folder.resolve())
        self.folders.make()
        self.history = History(self.folders.history, "harness")
        server = SERVERS[plan.servers](self.folders.root / SERVER)
        self._server: Any = server
        self._wiring = Wiring(lambda: server.ways, lambda *what: self._nemesis.told(*what))
        env = {"CHAOS_MUTATION": plan.mutation}
        self.crew = Crew(self.folders, self._wiring, server, self.history, env)
        parts = (plan.seed, self.crew, self._wiring, server, self.history)
        self._nemesis: Nemesis = (
            FailoverNemesis(*parts)
            if isinstance(server, Replicated)
            else ServerNemesis(*parts, after_start=self._set_fsync, loses=plan.loses)
        )

    def run(self) -> Verdict:
        try:
            if self._start():
                self._strike()
                self._calm_down()
            else:
                self.crew.surprises.append("the run never began")
            self._look()
        finally:
            self.crew.close()
            self._wiring.close()
            self._server.kill()
        asked = rules(durable=self._plan.wait_replicas > 0)
        verdict = Checker(read_history(self.folders.history), asked).check()
        verdict.problems["surprise"] = self.crew.surprises
        return verdict

    def _start(self) -> bool:
        """Start everything; whether a first step is trained."""
        if self._plan.servers == "single" and not self._server.can_step:
            self._say(
                "no libfaketime (Debian: faketime): clocks are stepped only in what scripts remember of them"
            )
        self._server.start()
        self._set_fsync()
        self._create_run()
        self._add_clients()
        return until(self._has_trained, RECOVER_S)

    def _add_clients(self) -> None:
        self.crew.add("trainer", "trainer")
        self.crew.add("producer", "producer")
        for number in range(self._plan.workers):
            self.crew.add(f"worker-{number}", "worker")
        self.crew.add("judge", "judge")
        self.crew.add("janitor", "janitor")

    def _create_run(self) -> None:
        ports = self._wiring.link("harness").ports
        store = Store(self._server.url_by(ports))
        Run.create(store, RUN, self._nonce, self._limits())
        store.close()

    def _limits(self) -> RunLimits:
        return limits(self._plan.wait_replicas)

    def _set_fsync(self) -> None:
        self._server.config_set("appendfsync", self._plan.fsync)

    def _has_trained(self, since: float = 0.0) -> bool:
        """Whether the trainer wrote down a step after `since`."""
        return any(event["op"] == "trained" and event["t"] > since for event in self._of_trainer())

    def _strike(self) -> None:
        self._say(f"{self._plan.faults} faults in {self._plan.seconds:g} s")
        dice = random.Random(self._plan.seed + 1)
        started = time.monotonic()
        times = sorted(dice.uniform(0, self._plan.seconds) for _ in range(self._plan.faults))
        for due in times:
            while time.monotonic() < started + due:
                self._turn()
            self._nemesis.strike()
        while time.monotonic() < started + self._plan.seconds:
            self._turn()

    def _work_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._turn()

    def _turn(self) -> None:
        self._nemesis.look()
        self.crew.tend()
        time.sleep(LOOK_S)

    def _calm_down(self) -> None:
        """No fault any more: the run must go on by itself, and end when it is told."""
        self._nemesis.calm()
        self.history.note("calm")
        calm = time.time()
        if not until(
            lambda: self._tended(lambda: self._has_trained(since=calm + 1)), self._recover_s
        ):
            self.crew.surprises.append("nothing was trained after the last fault")
        self.folders.finish.touch()
        # while it ends, who is told to stand by or was just restarted must still be tended
        until(lambda: self._tended(lambda: self._has_finished()), self._recover_s)
        late = self.crew.wait_for_end(self._recover_s)
        self.crew.surprises += [f"{name} did not leave when the run was over" for name in late]

    def _has_finished(self) -> bool:
        return any(event["op"] == "finished" for event in self._of_trainer())

    def _tended(self, condition: Callable[[], bool]) -> bool:
        self.crew.tend()
        return condition()

    def _of_trainer(self) -> list[Event]:
        files = self.folders.history.glob("trainer-*.jsonl")
        return [
            event
            for file in files
            for event in parse(file.read_bytes()[-TAIL_BYTES:].split(b"\n")[1:])
        ]

    def _look(self) -> None:
        with self._server.connect() as client:
            tasks = list(self._limits().tasks)
            found = look(client, RUN, tasks) | {"tokens": read_account(client, RUN, tasks)}
            self.history.note("final", **found)


class EmptyServerRun(ChaosRun):
    """The server comes back empty: nobody goes on as if nothing had happened, until somebody says
    --regenerate.
    """

    def _strike(self) -> None:
        self._work_for(self._plan.seconds / 2)
        self._say("the server comes back empty")
        self._server.kill()
        shutil.rmtree(self._server.folder / "appendonlydir")
        self.history.note("fault", kind="server comes back empty", target=SERVER, loses=True)
        empty = time.time()
        self._server.start()
        self._set_fsync()
        self._work_for(2 * LEASE_MS / 1000)
        if self._has_trained(since=empty + 1):
            self.crew.surprises.append("something was trained on an empty server")
        self._create_run()
        if not until(
            lambda: self._tended(lambda: LOST in self.crew.members["trainer"].exits),
            self._recover_s,
        ):
            self.crew.surprises.append("the trainer did not notice that the server is another one")
        self.crew.members["trainer"].flags = ("--regenerate",)
        self._work_for(self._plan.seconds / 2)


def rules(*, durable: bool) -> Rules:
    """`durable`: nothing answered as such may be lost, with whatever server."""
    return Rules(
        threshold=2 * SYNC_INTERVAL,
        rows=ROWS,
        answer_of=str,
        prompt_of=prompt_of,
        surely_fresh=SYNC_INTERVAL - 1,
        durable=durable,
    )


def prompt_of(gid: str) -> str:
    """Digest of the prompt of a draw: rows are drawn in order."""
    message = {"role": "user", "content": question(int(gid[-10:]) % ROWS)}
    return digest(np.array(Letters().apply_chat_template([message]), "<i4"))


def new_folder(base: Path, name: str) -> Path:
    folder = base / name
    if folder.exists():
        shutil.rmtree(folder)
    return folder
