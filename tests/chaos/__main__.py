"""usage: python -m tests.chaos [--seconds 480] [--faults 220] [--seed N] [--fsync always] [--loses] [--folder build/chaos]"""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path

from tests.chaos.harness import ChaosRun, Plan, new_folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--faults", type=int, default=220)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--fsync", choices=("always", "everysec"), default="always")
    parser.add_argument("--loses", action="store_true")
    parser.add_argument("--mutation", default="")
    parser.add_argument("--folder", type=Path, default=Path("build/chaos"))
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    plan = Plan(asked.seed, asked.seconds, asked.faults, asked.workers, asked.fsync, asked.loses, asked.mutation)
    run = ChaosRun(plan, new_folder(asked.folder, f"seed-{asked.seed}"), lambda text: print(text, flush=True))
    verdict = run.run()
    for name, value in verdict.figures.items():
        print(f"{name}: {value}")
    for kind, texts in verdict.problems.items():
        for text in texts[:10]:
            print(f"PROBLEM {kind}: {text}")
    return 0 if verdict.clean else 1


if __name__ == "__main__":
    sys.exit(main())
