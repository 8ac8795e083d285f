"""`rolloutmq gpu-check`: run and measure a few GRPO steps of the whole pipeline on one CUDA GPU.

Everything is real except the weights, which are random. A success deletes the run's new folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from math import nan
from pathlib import Path
from statistics import mean

import orjson
from rich.text import Text

from buffer.errors import ModelError
from buffer.readable import format_size
from consumer.handle.step_log import read_steps
from rolloutmq.check.machine import count_gpus, gpu_names
from rolloutmq.config.load import load_config
from rolloutmq.launch.launcher import Launcher
from rolloutmq.output import console, facts
from rolloutmq.presets import presets_folder
from rolloutmq.versions import all_versions

CONFIG = presets_folder() / "gpu_check.toml"
VERSIONS = ("nvidia driver", "torch", "cuda of torch", "vllm", "transformers")
SAMPLE = presets_folder() / "data" / "gsm8k_sample.jsonl"

Rows = list[tuple[str, str | Text]]  # name and value with unit


def check_gpu(steps: int, overrides: Sequence[str] = ()) -> None:
    """Run `steps` train steps and print a table. Raises ModelError without a usable GPU."""
    if count_gpus() == 0:
        raise ModelError(
            "there is no CUDA GPU on this machine: nothing was checked",
            hint="run it on a machine where `nvidia-smi` lists one",
        )
    import torch

    if not torch.cuda.is_available():
        raise ModelError(
            f"there is a GPU, but torch {torch.__version__} cannot use it: nothing was checked",
            hint="install the CUDA builds of torch and vLLM (`make setup` does it), "
            "and check the driver",
        )
    console().print(facts(measure(steps, overrides)))


def measure(steps: int, overrides: Sequence[str]) -> Rows:
    """Run the check's config in a new folder, which stays if the run raises."""
    os.environ.pop("REDIS_URL", None)  # the check has a server of its own
    Path("runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-", dir="runs"))
    settings = [
        f"run.dir={folder}",
        f"tasks.check.dataset.path={SAMPLE}",
        f"plan.steps={steps}",
        *overrides,
    ]
    config = load_config(CONFIG, settings)
    Launcher(config, CONFIG, settings, redis_url=None, exit_when_stuck=True).run()
    rows = read_rows(folder)
    shutil.rmtree(folder)
    return rows


def read_rows(folder: Path) -> Rows:
    """Read the measurements of a finished run, without its first step, which is a warm-up."""
    steps = read_steps(folder)
    warm = [step.metrics for step in (steps[1:] or steps)]

    def average(name: str) -> float:
        return mean([m[name] for m in warm if name in m] or [nan])

    step_s, train_s = average("time/step_s"), average("time/train_s")
    tokens = average("response_len/tokens")
    peak = max(m.get("memory/peak_bytes", 0.0) for m in warm)
    log = (folder / "logs" / "worker-0.log").read_bytes().splitlines()
    entries = [orjson.loads(line) for line in log if line.startswith(b"{")]
    updates = [entry["seconds"] for entry in entries if entry.get("message") == "weights loaded"]
    load_s = mean(updates[1:] or updates or [nan])
    versions = all_versions()
    return [
        ("GPU", gpu_names()),
        *((name, versions[name]) for name in VERSIONS if name in versions),
        ("train steps", str(len(steps))),
        ("step", f"{step_s:.2f} s"),
        ("waiting", f"{average('time/wait_s'):.2f} s"),
        ("training", f"{train_s:.2f} s"),
        ("generated and trained", f"{tokens / step_s:,.0f} tokens/s"),
        ("trained alone", f"{tokens / train_s:,.0f} tokens/s"),
        ("pause", f"{1000 * average('time/pause_s'):.0f} ms until the last receipt"),
        ("weights written", f"{1000 * average('time/publish_s'):.0f} ms"),
        ("logprobs, vLLM against trainer", f"{average('mismatch/abs_logprob'):.4f} nats apart"),
        ("trainer's peak memory", format_size(int(peak)) if peak else "not on a GPU"),
        ("weights loaded by the engine", f"{1000 * load_s:.0f} ms ({len(updates)} updates)"),
    ]
