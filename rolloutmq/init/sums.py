"""The sample of the math template for a machine without a GPU: sums that a small model learns."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

SPLITS = {"held_out.jsonl": 200, "warm_start.jsonl": 1500, "data.jsonl": 2300}  # 4,000 in all


def write_sums(folder: Path) -> None:
    """Write the files of SPLITS, which share no problem; each time the same ones."""
    lines = []
    for a, p, b, q, c in product(range(10), "+-", range(10), "+-", range(10)):
        total = a + int(f"{p}{b}") + int(f"{q}{c}")
        lines.append(json.dumps({"question": f"{a} {p} {b} {q} {c} =", "answer": str(total)}))
    random.Random(0).shuffle(lines)
    for name, size in SPLITS.items():
        (folder / name).write_text("\n".join(lines[:size]) + "\n", encoding="utf-8")
        del lines[:size]
