"""The command behind `make chaos` and `make soak`."""

from __future__ import annotations

import argparse
import secrets
import sys
from dataclasses import asdict, replace
from pathlib import Path

from proofs.chaos.checker import Verdict
from proofs.chaos.damage_run import all_trials, run_trials
from proofs.chaos.harness import SERVERS, ChaosRun, EmptyServerRun, Plan, new_folder
from proofs.chaos.history import read_history
from proofs.chaos.mutations import NAMES
from proofs.chaos.plan import LEASE_MS
from proofs.chaos.report import lines, recoveries, soak_table, write_report, write_sum


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(plan: Plan, base: Path, kind: type[ChaosRun] = ChaosRun) -> Verdict:
    what = "empty" if kind is EmptyServerRun else ""
    name = "-".join(filter(None, (*name_of(plan).split(), what)))
    say(f"seed {plan.seed}, {name_of(plan)}{what and ', '}{what}")
    chaos = kind(plan, new_folder(base, f"{name}-{plan.seed}"), say)
    verdict = chaos.run()
    events = read_history(chaos.folders.history)
    path = write_report(chaos.folders.root, asdict(plan), verdict, events)
    for line in lines(verdict, recoveries(events)):
        say(line)
    say(f"{'clean' if verdict.clean else 'NOT CLEAN'}; report: {path}")
    return verdict


def name_of(plan: Plan) -> str:
    """The servers of a run, and what they promise."""
    replicas = f" wait_replicas={plan.wait_replicas}" if plan.servers != "single" else ""
    return f"{plan.servers} {plan.fsync}{replicas}{' loses' * plan.loses}"


def halves(plan: Plan) -> list[Plan]:
    """A run that may lose nothing that was acknowledged, and one that may."""
    half = replace(plan, seconds=plan.seconds / 2, faults=plan.faults // 2)
    if plan.servers == "single":
        return [half, replace(half, fsync="everysec", loses=True)]
    return [replace(half, wait_replicas=1), replace(half, wait_replicas=0)]


def run_standard(plan: Plan, base: Path) -> bool:
    """All three kinds of run; whether they were clean."""
    if plan.servers != "single":
        return all([run(half, base).clean for half in halves(plan)])
    losing = replace(plan, seconds=plan.seconds / 5, faults=plan.faults // 5, fsync="everysec")
    verdicts = [run(plan, base), run(replace(losing, loses=True), base)]
    empty = run(replace(losing, seconds=20.0, faults=0), base, EmptyServerRun)
    say(f"seed {plan.seed}, all together")
    figures = [verdict.figures for verdict in verdicts] + [empty.figures | {"empty": True}]
    for line in write_sum(base, figures, 2 * LEASE_MS / 1000):
        say(line)
    return all(verdict.clean for verdict in [*verdicts, empty])


def run_soak(plan: Plan, base: Path) -> bool:
    """Both halves with servers of every kind; whether they were clean."""
    found = []
    for servers in SERVERS:
        share = replace(
            plan,
            servers=servers,
            seconds=plan.seconds / len(SERVERS),
            faults=plan.faults // len(SERVERS),
        )
        for half in halves(share):
            verdict = run(half, base)
            found.append((name_of(half), half.seconds, verdict))
            # after each: who ends it early has the rest
            (base / "soak.md").write_text("\n".join(soak_table(found)) + "\n", encoding="utf-8")
    for line in soak_table(found):
        say(line)
    return all(verdict.clean for *_, verdict in found)


def run_mutants(plan: Plan, base: Path) -> bool:
    """Every mutated build, by what it was caught; whether all were."""
    missed = []
    for name in NAMES:
        verdict = ChaosRun(
            replace(plan, mutation=name), new_folder(base, f"mutant-{name}"), lambda _: None
        ).run()
        by = ", ".join(
            f"{kind} ({len(texts)})" for kind, texts in verdict.problems.items() if texts
        )
        say(f"{name:>28}  {by or 'NOT CAUGHT'}")
        missed += [] if by else [name]
    return not missed


def run_damage(plan: Plan, base: Path, words: str) -> list[str]:
    """Every key of a live run damaged, one by one; the problems."""
    problems = run_trials(plan, base, say, all_trials(words))
    for problem in problems:
        say(f"PROBLEM {problem}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m proofs.chaos", description="Faults against a whole run."
    )
    add = parser.add_argument
    add("--seed", type=int, default=secrets.randbelow(1_000_000), help="decides which faults")
    add("--seconds", type=float, default=480.0, help="how long faults are dealt out")
    add("--faults", type=int, default=260, help="how many")
    add("--workers", type=int, default=3)
    add("--fsync", choices=("always", "everysec"), default="always")
    add("--loses", action="store_true", help="cut the end of the server's file off, now and then")
    add("--servers", choices=tuple(SERVERS), default="single")
    add("--wait-replicas", type=int, default=0)
    add("--mutation", choices=("", *NAMES), default="", help="a build that must be caught")
    fields = [action.dest for action in parser._actions if action.dest != "help"]
    add("--folder", type=Path, default=Path("build/chaos"))
    kind = parser.add_mutually_exclusive_group()
    add = kind.add_argument
    add("--mutants", action="store_true", help="every build that must be caught, one by one")
    add("--empty", action="store_true", help="the server comes back empty, once; no other faults")
    add("--damage", nargs="?", const="", metavar="WORDS", help="every key of a live run deleted or "
        "retyped, one by one; or those whose trial has WORDS")  # fmt: skip
    add("--standard", action="store_true", help="all three kinds of run, one after the other")
    add("--soak", action="store_true", help="with servers of every kind, one after the other")
    asked = parser.parse_args()
    plan = Plan(**{name: getattr(asked, name) for name in fields})
    if asked.damage is not None:
        return 1 if run_damage(plan, asked.folder, asked.damage) else 0
    if asked.mutants:
        clean = run_mutants(plan, asked.folder)
    elif asked.soak:
        clean = run_soak(plan, asked.folder)
    elif asked.standard:
        clean = run_standard(plan, asked.folder)
    else:
        clean = run(plan, asked.folder, EmptyServerRun if asked.empty else ChaosRun).clean
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
