"""What of `make gpu-check` can be checked without a GPU: all of it but the GPU."""

from __future__ import annotations

import re
from pathlib import Path

import orjson
import pytest

from tests.rolloutmq.conftest import in_process
from tests.rolloutmq.launch import small_check
from tests.warm_process import run_in_warm_process

SMALL = [
    "tiny_model.hidden=64", "tiny_model.layers=2", "tiny_model.heads=2", "tiny_model.kv_heads=1",
    "tiny_model.head_dim=32", "tiny_model.intermediate=64", "tiny_model.vocab_size=512",
]  # fmt: skip
QUICK = [
    "plan.batch_size=2", "tasks.check.sample.max_tokens=16",
    "engine.kv_cache_memory_bytes=67108864", "engine.omp_threads=1", "learner.learning_rate=1e-3",
]  # fmt: skip


def test_gpu_check_says_plainly_that_there_is_no_gpu() -> None:
    done = in_process("gpu-check", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 4
    assert (
        done.stderr.splitlines()[0]
        == "error: there is no CUDA GPU on this machine: nothing was checked"
    )


@pytest.mark.vllm
@pytest.mark.slow
def test_check_runs_on_a_cpu_in_small(tmp_path: Path) -> None:
    """The same code, processes and config, with another shape and two steps."""
    printed = run_in_warm_process(tmp_path, small_check.main, tmp_path, [*SMALL, *QUICK])
    rows = dict(orjson.loads(printed.splitlines()[-1]))
    assert rows["train steps"] == "2"
    # at least the first weights; the run may end before the worker loads those of both steps
    assert re.search(r"\([123] updates\)$", rows["weights loaded by the engine"])
    assert 0.0 < float(rows["logprobs, vLLM against trainer"].split()[0]) < 0.5
    assert list((tmp_path / "runs").iterdir()) == []
