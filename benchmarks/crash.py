"""`python -m benchmarks.crash`: what it costs when a process of a run is killed, moment by moment.

A whole run of the chaos harness (proofs/chaos), with simulated engines: its trainer is held in a
moment of its step, a process gets SIGKILL, and the trainer goes on if it is another one. Who died
is started again as a supervisor would. At the end the harness checks every promise: no group is
lost or trained twice, and the weights come from the steps in order.
"""

from __future__ import annotations

import shutil
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import psutil
import typer

from benchmarks.machine import machine_facts
from benchmarks.report import fill_in
from buffer.limits import RunLimits
from proofs.chaos.crew import until
from proofs.chaos.harness import ChaosRun, Plan
from proofs.chaos.history import CLAIMED, Event, parse, read_history
from proofs.chaos.plan import SAMPLES

HERE = Path(__file__).parent
MARK = "crash: written by `make bench-crash`"
MOMENTS = (
    *("before take", "in take", "after take", "in train", "after train", "in publish"),
    *("after publish", "in checkpoint", "after checkpoint", "after commit"),
)
SOME = ("in take", "in train", "in publish", "in checkpoint")
NOBODY, POWER = "nobody", "server, with the end of its file"
VICTIMS = {
    NOBODY: SOME,
    "trainer": MOMENTS,
    "server": MOMENTS,
    "worker": SOME,
    "producer": SOME,
    "judge": SOME,
    POWER: SOME,
}
"""Who is killed, and when. The end of a file is what a power failure takes without fsync."""
NAMES = {"worker": "worker-0"}

PATIENCE_S = 300.0
FIRST_TOKEN_S, TOKEN_S = 0.1, 0.08  # of the engines in proofs/chaos/client.py
TOKENS = 6


class Trial(NamedTuple):
    """`seconds`: until a step behind all before is committed.

    `start_s`: of them, until who was killed has started again, as Python loads it; 0: unknown.
    """

    server: str
    victim: str
    moment: str
    seconds: float
    start_s: float
    steps_again: int
    tokens_again: int


class CrashRun(ChaosRun):
    """Kills once for each of the `plans` (victim, moment), in a run that goes on."""

    def __init__(self, plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
        super().__init__(plan, folder, say)
        self.moments: Sequence[str] = MOMENTS
        self.kills: list[tuple[str, str, float, float]] = []
        """victim, moment, when it was killed, when the next step was committed"""

    def _strike(self) -> None:
        for moment in self.moments:
            for victim, moments in VICTIMS.items():
                if moment in moments and (victim != POWER or self._plan.loses):
                    self._kill(victim, moment)

    def _limits(self) -> RunLimits:
        # a judge in another process forks for each rollout
        return super()._limits().model_copy(update={"batch_size": 8})

    def _kill(self, victim: str, moment: str) -> None:
        hold, held = (self.folders.root / name for name in ("hold", "held"))
        hold.with_suffix(".part").write_text(moment)
        hold.with_suffix(".part").rename(hold)
        self._until(held.exists, f"the trainer never was {moment}")
        before = max((event["args"]["step"] for event in self._commits()), default=0)
        killed = time.time()
        if victim in ("server", POWER):
            nemesis: Any = self._nemesis
            (nemesis._lose_tail if victim == POWER else nemesis._server_kill)("")
        elif victim != NOBODY:
            self.crew.members[NAMES.get(victim, victim)].send(signal.SIGKILL)
        held.unlink()
        self._until(
            lambda: any(e["args"]["step"] > before for e in self._commits(killed)),
            f"nothing was committed after {victim} died {moment}",
        )
        committed = time.time()
        self.kills.append((victim, moment, killed, committed))
        self._say(f"{self._plan.fsync:>9}  {victim:>10}  {moment:<16} {committed - killed:6.1f} s")

    def _until(self, condition: Callable[[], bool], problem: str) -> None:
        if not until(lambda: self._tended(condition), PATIENCE_S):
            raise RuntimeError(problem)

    def _commits(self, since: float = 0.0) -> list[Event]:
        files = self.folders.history.glob("trainer-*.jsonl")
        events = (event for file in files for event in parse(file.read_bytes().split(b"\n")))
        return [
            event
            for event in events
            if event["op"] == "commit" and event["phase"] == "ok" and event["t"] >= since
            and event["reply"][0] == "OK"
        ]  # fmt: skip

    def trials(self) -> Iterator[Trial]:
        """Yield the kills with what was done again because of them."""
        events = read_history(self.folders.history)
        for n, (victim, moment, killed, committed) in enumerate(self.kills):
            end = self.kills[n + 1][2] if n + 1 < len(self.kills) else committed
            later = [event for event in events if killed < event["t"] <= end]
            steps = {event["step"] for event in events
                     if event["op"] == "trained" and event["t"] <= killed}  # fmt: skip
            again = {e["step"] for e in later if e["op"] == "trained"} & steps
            tokens = _made_twice(events, killed, later)
            if victim == "worker":
                tokens += _held(events, NAMES[victim], killed)
            seconds = round(committed - killed, 2)
            name = NAMES.get(victim, victim)
            starts = (e["t"] for e in events if e["op"] == "started" and e["who"] == name)
            start = round(min((t - killed for t in starts if t > killed), default=0.0), 2)
            figures = (seconds, min(start, seconds), len(again), tokens)
            yield Trial(self._plan.fsync, victim, moment, *figures)


def _tokens(event: Event) -> int:
    return sum(int(piece[1]) for piece in event["pieces"])


def _made_twice(events: Sequence[Event], killed: float, later: Sequence[Event]) -> int:
    """Return the tokens of `later` of members that had all of theirs before."""
    made: defaultdict[tuple[str, int], int] = defaultdict(int)
    for event in events:
        if event["op"] == "made" and event["t"] <= killed:
            made[event["gid"], event["member"]] += _tokens(event)
    return sum(
        _tokens(event)
        for event in later
        if event["op"] == "made" and made[event["gid"], event["member"]] >= TOKENS
    )


def _held(events: Sequence[Event], worker: str, killed: float) -> int:
    """Return the tokens, by the engine's speed, of requests that died with their worker."""
    claimed: dict[str, float] = {}
    ended: set[tuple[str, int]] = set()
    for event in events:
        if event["who"] != worker or event["t"] > killed:
            continue
        if event["op"] == "claim" and event.get("phase") == "ok":
            claimed |= dict.fromkeys(event["reply"][CLAIMED], event["t"])
        elif event["op"] in ("submit", "release") and event["phase"] == "ok":
            claimed.pop(event["args"]["gid"], None)
        elif event["op"] == "made":
            ended.add((event["gid"], event["member"]))
    lost = 0.0
    for gid, begun in claimed.items():
        running = sum((gid, member) not in ended for member in range(SAMPLES))
        lost += running * min(TOKENS, max(0.0, killed - begun - FIRST_TOKEN_S) // TOKEN_S)
    return int(lost)


def rows(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield the table: of each victim, the median and the worst of its moments."""
    yield "| killed | server | moments | seconds | of which start | steps again | tokens again |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for victim in dict.fromkeys(trial.victim for trial in trials):
        for server in dict.fromkeys(trial.server for trial in trials):
            of = [each for each in trials if (each.victim, each.server) == (victim, server)]
            if not of:
                continue
            waits = [each.seconds for each in of]
            start = statistics.median(each.start_s for each in of)
            cells = [victim, server, len({each.moment for each in of})]
            cells.append(f"{statistics.median(waits):.1f}, worst {max(waits):.1f}")
            cells.append(f"{start:.1f}" if start else "")
            cells += [max(each.steps_again for each in of), max(each.tokens_again for each in of)]
            yield f"| {' | '.join(map(str, cells))} |"


def draw(trials: Sequence[Trial], file: Path) -> None:
    """Draw the seconds of each kill, one row for each victim."""
    from matplotlib.figure import Figure as Canvas  # not in every worker

    victims = list(dict.fromkeys(trial.victim for trial in trials))
    canvas = Canvas(figsize=(9, 3), layout="constrained")
    axes = canvas.add_subplot()
    for server, marker in {"always": "o", "everysec": "x"}.items():
        of = [trial for trial in trials if trial.server == server]
        rows_of = [victims.index(trial.victim) for trial in of]
        axes.scatter([trial.seconds for trial in of], rows_of, marker=marker, label=server)
    axes.set_yticks(range(len(victims)), victims)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds until the next committed step")
    axes.grid(alpha=0.3)
    axes.legend(title="appendfsync")
    canvas.savefig(file, dpi=110)


def write(trials: Sequence[Trial], facts: dict[str, str]) -> None:
    """Write results, the picture, and the table of the README."""
    found = {"machine": facts, "trials": [trial._asdict() for trial in trials]}
    results = orjson.dumps(found, option=orjson.OPT_INDENT_2)
    (HERE / "results" / "crash.json").write_bytes(results)
    draw(trials, HERE / "results" / "crash.png")
    shown = ", ".join(f"{name} {value}" for name, value in facts.items())
    fill_in(HERE / "README.md", MARK, [*rows(trials), "", f"{shown}."])


def main(
    update: bool = typer.Option(False, "--update", help="write results and README"),
    quick: bool = typer.Option(False, "--quick", help="two moments, one server"),
) -> None:
    """Kill each process of a run at set moments, with a durable and with an everysec server."""
    base = Path(tempfile.mkdtemp(prefix="rmq-crash-", dir="/dev/shm"))
    trials: list[Trial] = []
    problems = 0
    load = psutil.getloadavg()[0]
    try:
        for fsync in ("always", "everysec")[: 1 if quick else 2]:
            plan = Plan(1, 0.0, 0, workers=2, fsync=fsync, loses=fsync == "everysec")
            run = CrashRun(plan, base / fsync, typer.echo)
            if quick:
                run.moments = ("in take", "in checkpoint")
            verdict = run.run()
            if not verdict.clean:
                typer.echo(f"PROBLEM {verdict!r}")
            problems += not verdict.clean
            trials += run.trials()
    finally:
        shutil.rmtree(base, ignore_errors=True)
    facts = machine_facts() | {"load": f"{load:.0f} to {psutil.getloadavg()[0]:.0f}"}
    typer.echo("\n".join(rows(trials)))
    if update and not problems:
        write(trials, facts)
    raise typer.Exit(problems)


if __name__ == "__main__":
    typer.run(main)
