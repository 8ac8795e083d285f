"""Keys of a live run are damaged one by one, and each time the run is made again from its checkpoint.

work ─▶ damage one key ─▶ the trainer ends ─▶ --regenerate, while all others still work ─▶ they end
  ▲                                                                                           │
  └──── start again ◀──── the account is judged ◀──── stop ◀──── start again, and train ◀─────┘
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buffer.errors import RolloutMQError
from buffer.ids import new_nonce
from buffer.ledger.position import Position
from buffer.limits import RunLimits
from buffer.maintenance.regeneration import Regeneration
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.rollout import FIRST_WEIGHTS
from consumer.handle.checkpoint import CheckpointFolder
from proofs.chaos.checker import Checker
from proofs.chaos.crew import until
from proofs.chaos.damaged_keys import PREFIX, TARGETS, WAYS, Target, strike
from proofs.chaos.final_look import look
from proofs.chaos.harness import ChaosRun, Plan, new_folder, rules
from proofs.chaos.history import Event, parse, read_history
from proofs.chaos.plan import CHECKPOINT_EVERY, FENCED, INLINE, LEASE_MS, LOST, REFUSED, RUN, limits

LIMIT_S = 240.0
"""In which a process continues, ends, or leaves when it is asked to."""

WAIT_S = 2.5 * LEASE_MS / 1000
"""After the end of one process, for the others."""

STEPS = 2 * CHECKPOINT_EVERY
"""That show a trainer to be at work: with two checkpoints, and new weights twice."""

CLIENTS = ("trainer", "producer", "worker-0", "worker-1")
TRIES = 3


@dataclass
class Trial:
    """One damage, and what came of it; `problems` are what must not be."""

    target: Target
    way: str
    key: str = ""
    is_found: bool = False
    """by fsck, while the processes work"""
    ended: dict[str, str] = field(default_factory=dict)
    """the error of each process that ended"""
    made_again: str = ""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.target} {self.way}"


class DamageRun(ChaosRun):
    """Tries what `trials` say in one run; ends with the first that the run does not survive."""

    trials: Sequence[Trial] = ()

    def __init__(self, plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
        super().__init__(plan, folder, say)
        self._broken = False
        self._known: set[str] = set()
        self.done = 0
        """number of trials that were made"""

    def _limits(self) -> RunLimits:
        one = {INLINE: limits().tasks[INLINE]}
        changes = {"tasks": one, "batch_size": 8, "max_tries": TRIES, "order": "fifo"}
        return limits().model_copy(update=changes)

    def _add_clients(self) -> None:
        for name in CLIENTS:
            self.crew.add(name, name.partition("-")[0])

    def _strike(self) -> None:
        for trial in self.trials:
            with self._opened() as run:
                _bury_one(run)
            self._try(trial)
            self.done += 1
            self._say(row(trial))
            self._broken = bool(trial.problems)
            if self._broken:
                break

    def _calm_down(self) -> None:
        if not self._broken:
            super()._calm_down()

    def _opened(self) -> _OpenRun:
        return _OpenRun(self._server.url)

    # -- one trial ---------------------------------------------------------------------------------

    def _try(self, trial: Trial) -> None:
        with self._server.connect() as client, self._opened() as run:
            since = time.time()
            if not until(lambda: self._struck(client, trial), LIMIT_S * trial.target.is_used):
                return
            before = self._sizes()
            trial.is_found = _names(run, trial.key)
        self._observe(trial, before)
        self._bring_back(trial, before, since)

    def _bring_back(self, trial: Trial, before: dict[Path, int], since: float) -> None:
        self._stop(trial, CLIENTS[:1])
        self._regenerate(trial, since)
        self._stop(trial, CLIENTS[1:])
        self._read_logs(trial, before)
        if trial.problems:
            return
        self._start_again(trial)
        self._stop(trial, CLIENTS)
        with self._opened() as run:
            trial.problems += [found.text for found in run.account.fsck().damage[:3]]
        trial.problems += self._account()[:3]
        if not trial.problems:
            self._start_again(trial)

    def _regenerate(self, trial: Trial, since: float) -> None:
        checkpoints = CheckpointFolder(self.folders.checkpoints)
        steps = checkpoints.steps()
        position = checkpoints.read(steps[-1]) if steps else Position()
        again = Regeneration(position, take_over=True)
        limits = self._limits()
        store = Store(self._server.url, name="chaos-harness")
        try:
            left = again.leftovers(store, RUN, list(limits.tasks))
            Run.create(store, RUN, self._nonce, limits, regeneration=again)
        except RolloutMQError as error:
            trial.problems.append(f"not made again: {error}")
            return
        finally:
            store.close()
        trial.made_again = f"step {position.step}, {left.groups} groups, {left.steps} steps after"
        # what was handed out after the checkpoint is gone, and made again
        self.history.note(
            "fault", kind=str(trial), target=trial.key, loses=True, since=since, ended=time.time()
        )

    def _struck(self, client: Any, trial: Trial) -> bool:
        trial.key = strike(client, trial.target, trial.way)
        return bool(trial.key)

    def _sizes(self) -> dict[Path, int]:
        """Return the sizes of logs and histories: what is behind them is new."""
        folders = (self.folders.logs, self.folders.history)
        return {path: path.stat().st_size for folder in folders for path in folder.iterdir()}

    def _observe(self, trial: Trial, before: dict[Path, int]) -> None:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            events = [
                event
                for path in self.folders.history.iterdir()
                for event in parse(path.read_bytes()[before.get(path, 0) :].split(b"\n"))
            ]
            waits = {name for name in CLIENTS if not _has_worked(name, events)}
            gone = {name for name in CLIENTS if not self.crew.members[name].is_up}
            if waits <= gone:
                break
            if gone:
                end = min(end, time.monotonic() + WAIT_S)
            time.sleep(0.1)
        else:
            if not gone:
                trial.problems.append(f"{', '.join(sorted(waits))} neither worked nor ended")
        trial.ended = {
            event["who"]: f"{event['why']}: {event['said']}"
            for event in events
            if event["op"] == "ended" and event["why"]
        }

    def _stop(self, trial: Trial, names: Sequence[str]) -> None:
        for name in names:
            self.crew.members[name].send(signal.SIGTERM)
        until(lambda: not any(self.crew.members[name].is_up for name in names), LIMIT_S)
        late = [name for name in names if self.crew.members[name].is_up]
        trial.problems += [f"{name} did not leave" for name in late]
        for name in late:
            self.crew.members[name].send(signal.SIGKILL)
        for name in names:
            member = self.crew.members[name]
            assert member.popen is not None
            code = member.popen.wait()
            # a signal that comes before the client handles it ends it at once
            if code not in (0, FENCED, LOST, REFUSED, -signal.SIGTERM) and name not in late:
                trial.problems.append(f"{name} ended with exit code {code}")

    def _read_logs(self, trial: Trial, before: dict[Path, int]) -> None:
        for path, size in before.items():
            if path.suffix == ".log" and b"Traceback" in path.read_bytes()[size:]:
                trial.problems.append(f"a traceback in {path.name}")
        is_named = any(_mentions(said, trial.key) for said in trial.ended.values())
        if trial.ended and not (trial.is_found or is_named):
            trial.problems.append("neither fsck nor an error names the key")

    def _account(self) -> list[str]:
        """Return what the checker finds wrong that was not wrong before."""
        with self._server.connect() as client:
            self.history.note("final", **look(client, RUN, [INLINE]))
        verdict = Checker(read_history(self.folders.history), rules(durable=False)).check()
        problems = {f"{kind}: {text}" for kind, texts in verdict.problems.items() for text in texts}
        new = sorted(problems - self._known)
        self._known |= problems
        return new

    def _start_again(self, trial: Trial) -> None:
        since = time.time()
        for name in CLIENTS:
            self.crew.replace(name)
        if not until(lambda: self._has_trained(since), LIMIT_S):
            trial.problems.append("nothing was trained after the restart")


class _OpenRun:
    """Opens the run for the harness, and closes its store."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> Run:
        self._store = Store(self._url, name="chaos-harness")
        return Run.open(self._store, RUN)

    def __exit__(self, *error: object) -> None:
        self._store.close()


def _bury_one(run: Run) -> None:
    """Let a group fail until it is dead."""
    nonce = new_nonce()
    run.fleet.register("harness", nonce, {"engine": "none"})
    while not run.store.client.exists(run.keys.dead):
        newest = run.control.state().weights or FIRST_WEIGHTS
        for job in run.jobs.claim("harness", nonce, new_nonce(), newest, 1).jobs:
            run.jobs.release("harness", job, "failed")
    run.fleet.deregister("harness", nonce)


def _names(run: Run, name: str) -> bool:
    return any(_mentions(f"{found.key} {found.text}", name) for found in run.account.fsck().damage)


def _mentions(text: str, name: str) -> bool:
    """Return whether a message names a key, or the group that it belongs to."""
    of_group = name.split(":")[1] if name.startswith(("group:", "payload:", "dead:")) else name
    text = text.replace("{RUN}", f"{{{RUN}}}")
    return PREFIX + name in text or (of_group != name and of_group in text)


def _has_worked(name: str, events: Iterable[Event]) -> bool:
    own: list[Any] = [event for event in events if event["who"] == name]
    if name == "trainer":
        return len([event for event in own if event["op"] == "trained"]) >= STEPS
    op = "enqueue" if name == "producer" else "submit"
    return any(event["op"] == op and event.get("phase") == "ok" for event in own)


def row(trial: Trial) -> str:
    """Return a line for people."""
    if not trial.key and not trial.problems:
        return f"{trial}: no such key in this run"
    parts = [f"fsck: {'found' if trial.is_found else 'clean'}"]
    parts += [f"{name} ended with {said}" for name, said in sorted(trial.ended.items())]
    parts += [f"made again: {trial.made_again}"] if trial.made_again else []
    parts += [f"PROBLEM {problem}" for problem in trial.problems]
    return f"{trial}: " + "\n    ".join(parts)


def all_trials(words: str = "") -> list[Trial]:
    """Return a trial of every key in each way; with `words`, those whose name has them."""
    trials = [Trial(target, way) for target in TARGETS for way in WAYS]
    return [trial for trial in trials if words in str(trial)]


def run_trials(
    plan: Plan, base: Path, say: Callable[[str], None], trials: Sequence[Trial]
) -> list[str]:
    """Make trials, in a new run behind each that a run did not survive; return all problems."""
    problems = []
    left = trials
    while left:
        chaos = DamageRun(plan, new_folder(base, f"damage-{len(trials) - len(left)}"), say)
        chaos.trials = left
        verdict = chaos.run()
        done = left[: chaos.done]
        if not any(trial.problems for trial in done):
            problems += [
                f"{kind}: {text}" for kind, texts in verdict.problems.items() for text in texts
            ]
        problems += [f"{trial}: {problem}" for trial in done for problem in trial.problems]
        left = left[chaos.done :]
        if not done:
            break
    return problems
