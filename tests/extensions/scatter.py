"""Print how far each optional feature reaches into the rest of the product.

    python -m tests.extensions.scatter

A feature that is attached well is mentioned in at most 3 files outside its folder.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.programs import ROOT

PACKAGES = ("rolloutmq/", "buffer/", "producer_workers/", "consumer/")

FEATURES = {  # files of its own, and words that mention it
    "gateway": (r"extensions/(gateway|environments)/", r"gateway"),
    "live sessions": (r"extensions/gateway/", r"LIVE_OPENING|on_demand|limit_claim|[Ll]ive sessions"),
    "kept turns": (r"extensions/gateway/|groups/kept_turns|lua/keep_turns", r"kept_turns|with_turns|keeps_turns|KeptTurns"),
    "environments": (r"extensions/environments/", r"harbor|verifiers\b|openenv|nemo_gym"),
    "trainers of others": (r"extensions/trainers/", r"xtuner|\bverl\b|skyrl|\bmiles\b"),
    "answers": (r"extensions/answers/", r"gsm8k|math_verify"),
    "tracing": (r"extensions/tracing/", r"tracing|OTEL|trace_run"),
    "metric writers": (r"extensions/writers/|imports\.py", r"tensorboard|wandb"),
    "teachers": (r"extensions/teacher/", r"teach|distill"),
    "bucket": (r"extensions/bucket/", r"obstore|s3://"),
    "critic": (r"(learner|config)/critic", r"\b[Cc]ritic\b|Critic[A-Z]|\bgae\b"),
    "deltas": (r"weights/delta|host_folders", r"delta_base|import.*\bdelta\b|\bdelta\.|weights\.delta"),
    "images": (r"producer_workers/images|image_records|vllm/images", r"\bimages?\b|multimodal"),
    "routed experts": (r"expert_gates|routing_replay", r"expert"),
    "sampling mask": (r"sampling_mask|column_readers", r"sampling_mask|records_masks"),
    "save and restore": (r"buffer/snapshot/", r"buffer[./]snapshot|Snapshot(Error|Facts|Loader)|\bLOADING\b"),
    "simulate": (r"simulation/|cli/simulate", r"simulat(e|ion)\b"),
}  # fmt: skip


def table() -> list[tuple[str, int, int, int]]:
    """Return of each feature: its name, the lines of its own files, other files, and their lines."""
    listed = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    product = [
        path
        for path in listed.stdout.split()
        if path.endswith((".py", ".lua", ".js")) and "vendor/" not in path
    ]
    lines = {path: Path(ROOT, path).read_text(encoding="utf-8").splitlines() for path in product}
    rows = []
    for name, (own, words) in FEATURES.items():
        mine = [path for path in product if re.search(own, path)]
        found = [
            sum(bool(re.search(words, line)) for line in lines[path])
            for path in product
            if path not in mine
        ]
        others = [count for count in found if count]
        rows.append((name, sum(len(lines[path]) for path in mine), len(others), sum(others)))
    return rows


if __name__ == "__main__":
    lines = [f"{'feature':20}{'own lines':>10}{'other files':>13}{'their lines':>13}"]
    lines += [f"{name:20}{own:10}{files:13}{found:13}" for name, own, files, found in table()]
    sys.stdout.write("\n".join(lines) + "\n")
