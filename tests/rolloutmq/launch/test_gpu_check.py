"""What of `make gpu-check` can be checked without a GPU: all of it but the GPU."""

from __future__ import annotations

import re
from pathlib import Path

import orjson
import pytest
from transformers import AutoConfig, AutoTokenizer

from buffer.errors import ModelError
from consumer.grpo.models.model_folder import load_model
from consumer.grpo.models.tiny_model import build_tiny_model
from rolloutmq.config.load import load_config
from rolloutmq.launch.gpu_check import CONFIG, require_gpu
from rolloutmq.launch.placement import place
from tests.rolloutmq.conftest import in_process
from tests.rolloutmq.launch import small_check
from tests.warm_process import run_in_warm_process

SMALL = [
    "tiny_model.hidden=64",
    "tiny_model.layers=2",
    "tiny_model.heads=2",
    "tiny_model.kv_heads=1",
    "tiny_model.head_dim=32",
    "tiny_model.intermediate=64",
    "tiny_model.vocab_size=512",
]
QUICK = [
    "plan.batch_size=2",
    "tasks.check.sample.max_tokens=16",
    "engine.kv_cache_memory_bytes=67108864",
    "engine.omp_threads=1",
    "learner.learning_rate=1e-3",
]


def test_gpu_check_says_plainly_that_there_is_no_gpu() -> None:
    done = in_process("gpu-check", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 4
    assert (
        done.stderr.splitlines()[0]
        == "error: there is no CUDA GPU on this machine: nothing was checked"
    )


def test_gpu_check_says_so_when_torch_cannot_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("it can")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ModelError, match="cannot use it: nothing was checked"):
        require_gpu()


def test_gpu_check_has_the_shape_of_qwen3_and_puts_both_on_one_gpu() -> None:
    config = load_config(CONFIG)
    spec = config.tiny_model
    attention = spec.hidden * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    weights = (
        spec.layers * (attention + 3 * spec.hidden * spec.intermediate)
        + (spec.vocab_size or 0) * spec.hidden
    )
    assert weights == pytest.approx(0.596e9, rel=0.01)
    placement = place(config.launch, 1)
    assert (placement.trainer, placement.workers) == ([0], [[0]])
    assert place(config.launch, 8) == placement


def test_model_of_the_check_has_rows_beyond_its_tokenizer(tmp_path: Path) -> None:
    config = load_config(CONFIG, SMALL)
    build_tiny_model(tmp_path / "model", config.tiny_model, 1)
    shape = AutoConfig.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) < shape.vocab_size == 512
    assert shape.tie_word_embeddings
    assert load_model(tmp_path / "model").get_input_embeddings().weight.shape == (512, 64)
    # a model with random weights answers with tokens that the tokenizer does not know
    assert isinstance(tokenizer.decode([7, 511, 400], skip_special_tokens=True), str)


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
