"""Keys of a live run are deleted, or given another type, one by one.

work ─▶ damage one key ─▶ all processes continue, or end with an error ─▶ stop ─▶ fsck
  ▲                                                                              │
  └──── start again, and train ◀──── the account is judged ◀──── fsck --repair ◀─┘
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from buffer.errors import RunError
from buffer.model.ids import new_nonce
from buffer.model.limits import RunLimits
from buffer.redis.store import Store
from buffer.rollouts.rollout import FIRST_WEIGHTS
from buffer.run import Run
from tests.chaos.checker import Checker
from tests.chaos.crew import ROOT, until
from tests.chaos.damaged_keys import PREFIX, TARGETS, WAYS, Target, strike
from tests.chaos.final_look import look
from tests.chaos.harness import ChaosRun, Plan, new_folder, rules
from tests.chaos.history import Event, parse, read_history
from tests.chaos.plan import CHECKPOINT_EVERY, FENCED, INLINE, LEASE_MS, LOST, REFUSED, RUN, limits

LIMIT_S = 60.0
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
    found: str = ""
    """by fsck: "live", "rest" or nothing"""
    ended: dict[str, str] = field(default_factory=dict)
    """the error of each process that ended"""
    repaired: str = ""
    made_again: str = ""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.target} {self.way}"

    @property
    def outcome(self) -> str:
        """Of the way back, in words; "" if none was taken."""
        ways = {"repaired": self.repaired, "made again": self.made_again}
        return "; ".join(f"{how}: {what}" for how, what in ways.items() if what)


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
        with self._opened() as run:
            _bury_one(run)
        for trial in self.trials:
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
            trial.found = "live" if _names(run, trial.key) else ""
        self._observe(trial, before)
        self._bring_back(trial, before, since)

    def _bring_back(self, trial: Trial, before: dict[Path, int], since: float) -> None:
        self._stop(trial)
        self._read_logs(trial, before)
        self._check_and_repair(trial, since)
        if not trial.problems:
            trial.problems += self._account()[:3]
            self._start_again(trial)

    def _struck(self, client: Any, trial: Trial) -> bool:
        trial.key = strike(client, trial.target, trial.way)
        return bool(trial.key)

    def _sizes(self) -> dict[Path, int]:
        """Return the sizes of logs and histories: what is behind them is new."""
        folders = (self.folders.logs, self.folders.history)
        return {path: path.stat().st_size for folder in folders for path in folder.iterdir()}

    def _observe(self, trial: Trial, before: dict[Path, int]) -> None:
        """Wait until each process has worked on, or has ended."""
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

    def _stop(self, trial: Trial, names: Sequence[str] = CLIENTS) -> None:
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
        if trial.ended and not any(_mentions(said, trial.key) for said in trial.ended.values()):
            trial.problems.append("no error names the key")

    def _check_and_repair(self, trial: Trial, since: float) -> None:
        """Run fsck, and repair what it finds; its account and that of the checker must agree."""
        with self._opened() as run:
            is_sound = run.account.fsck().clean
        if is_sound and (lost := self._account()):
            trial.problems.append(f"fsck does not see: {'; '.join(lost[:3])}")
        if is_sound:
            return
        trial.found = trial.found or "rest"
        end = time.monotonic() + LIMIT_S
        while (done := self._repair())[0] == RunError.exit_code and time.monotonic() < end:
            time.sleep(0.5)  # a process that was killed counts as alive for a while
        code, report = done
        if code:
            texts = [found["text"] for found in report.get("damage", ())]
            trial.problems.append(f"not repaired: {'; '.join(texts[:3]) or report['error']}")
            return
        changed = report["repair"]
        counts = {how.replace("_", " "): len(changed[how]) for how in ("drawn_again", "closed")}
        shown = [f"{count} {how}" for how, count in counts.items() if count]
        trial.repaired = ", ".join([f"{len(changed['keys'])} keys", *shown])
        facts = {"kind": str(trial), "target": trial.key, "closed": changed["closed"]}
        self.history.note("fault", loses=True, since=since, **facts)

    def _repair(self) -> tuple[int, dict[str, Any]]:
        """Run the command as a user does; return its exit code and what it prints."""
        where = ("--redis-url", self._server.url, "--run-dir", str(self.folders.root), "--run", RUN)
        words = (sys.executable, "-m", "rolloutmq", "fsck", "--repair", "--yes", "--json", *where)
        done = subprocess.run(words, cwd=ROOT, capture_output=True, check=False)
        if b"Traceback" in done.stderr:
            return done.returncode, {"error": f"a traceback of fsck: {done.stderr[-900:].decode()}"}
        found = orjson.loads(done.stdout) if done.stdout else {}
        error = orjson.loads(done.stderr)["error"] if done.returncode else {}
        return done.returncode, {**found, **({"error": str(error)} if error else {})}

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
        return Run.open_damaged(self._store, RUN)

    def __exit__(self, *error: object) -> None:
        self._store.close()


def _bury_one(run: Run) -> None:
    """Let a group fail until it is dead."""
    nonce = new_nonce()
    run.fleet.register("harness", nonce, {"engine": "none"})
    while not run.store.control.exists(run.keys.dead):
        newest = run.control.state().weights or FIRST_WEIGHTS
        for job in run.jobs.claim("harness", nonce, new_nonce(), newest, 1).jobs:
            run.jobs.release("harness", job, "failed")
    run.fleet.deregister("harness", nonce)


def _names(run: Run, name: str) -> bool:
    """Return whether fsck reports the key."""
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
    parts = [f"fsck: {trial.found or 'clean'}"]
    parts += [f"{name} ended with {said}" for name, said in sorted(trial.ended.items())]
    parts += [trial.outcome] if trial.outcome else []
    parts += [f"PROBLEM {problem}" for problem in trial.problems]
    return f"{trial}: " + "\n    ".join(parts)


def table(trials: Sequence[Trial]) -> list[str]:
    """Return lines of Markdown: a row for each kind of key."""
    found: dict[str, dict[str, str]] = {}
    for trial in trials:
        found.setdefault(str(trial.target), {})[trial.way] = _cell(trial)
    rows = [(f"`{name}`", *(cells.get(way, "") for way in WAYS)) for name, cells in found.items()]
    head = ("key", *WAYS)
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _cell(trial: Trial) -> str:
    if not trial.key:
        return "none in this run"
    parts = [f"{', '.join(sorted(trial.ended))} end" if trial.ended else "all continue"]
    parts += [trial.outcome] if trial.outcome else []
    return "; ".join([*parts, *(f"PROBLEM {problem}" for problem in trial.problems)])


def all_trials(words: str = "") -> list[Trial]:
    """Return a trial of every key in each way; with `words`, those whose name has them."""
    trials = [Trial(target, way) for target in TARGETS for way in WAYS]
    return [trial for trial in trials if words in str(trial)]


def run_trials(
    plan: Plan,
    base: Path,
    say: Callable[[str], None],
    trials: Sequence[Trial],
    kind: type[DamageRun] = DamageRun,
) -> list[str]:
    """Make trials, in a new run behind each that a run did not survive; return all problems."""
    problems = []
    left = trials
    while left:
        chaos = kind(plan, new_folder(base, f"damage-{len(trials) - len(left)}"), say)
        chaos.trials = left
        verdict = chaos.run()
        done = left[: chaos.done]
        if not any(trial.problems for trial in done):
            problems += [
                f"{kind}: {text}" for kind, texts in verdict.problems.items() for text in texts
            ]
        problems += [f"{trial}: {problem}" for trial in done for problem in trial.problems]
        left = left[chaos.done :]
        # after each: who ends it early has the rest
        (base / "damage.md").write_text("\n".join(table(trials)) + "\n", encoding="utf-8")
        if not done:
            break
    return problems
