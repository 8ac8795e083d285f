from __future__ import annotations

from pathlib import Path

import orjson
import pytest
import torch
from transformers import AutoTokenizer

from buffer.errors import DatasetError
from consumer.grpo.models.model_folder import load_model, load_tokenizer
from rolloutmq.config.small_model import WarmStartConfig
from rolloutmq.extensions.demo.warm_start import (
    Demonstration,
    WarmStartProgress,
    read_problems,
    warm_start,
)
from tests.consumer.grpo.models.tiny import SPEC, build_model

QUESTION = "State the final answer to the following arithmetic problem: 4 + 17 - 2 ="
QUICK = WarmStartConfig(
    max_steps=40, development_problems=8, batch_size=8, check_every_steps=10, stop_accuracy=0.9
)


def digit_problems(count: int = 80) -> list[Demonstration]:
    return [
        Demonstration([{"role": "user", "content": f"say {n % 10}"}], str(n % 10))
        for n in range(count)
    ]


def test_tokenizer_makes_one_token_per_digit_and_per_phrase(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer.encode(QUESTION, add_special_tokens=False)
    assert [tokenizer.decode(i) for i in ids] == [
        SPEC.phrases[0], "4", " + ", "1", "7", " - ", "2", " =",
    ]  # fmt: skip


def test_tokenizer_marks_a_character_that_it_does_not_know(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.encode("é1", add_special_tokens=False)[0] == tokenizer.unk_token_id


def test_build_gives_the_same_weights_when_the_seed_is_the_same(
    model_dir: Path, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = build_model(tmp_path)
    assert torch.equal(before, torch.get_rng_state()), "the caller's random state was touched"
    assert (again / "model.safetensors").read_bytes() == (
        model_dir / "model.safetensors"
    ).read_bytes()
    other = build_model(tmp_path, seed=1)
    assert (other / "model.safetensors").read_bytes() != (
        model_dir / "model.safetensors"
    ).read_bytes()


def test_warm_start_teaches_the_model_and_stops_early(model_dir: Path, tmp_path: Path) -> None:
    seen: list[WarmStartProgress] = []
    config = QUICK.model_copy(update={"max_steps": 400})
    last = warm_start(model_dir, tmp_path / "out", digit_problems(), config, seen.append)
    assert last.accuracy >= 0.9
    assert last.step < 400
    assert [p.step for p in seen] == list(range(1, last.step + 1))
    load_tokenizer(tmp_path / "out")
    load_model(tmp_path / "out")


def test_warm_start_gives_the_same_weights_when_the_seed_is_the_same(
    model_dir: Path, tmp_path: Path
) -> None:
    config = QUICK.model_copy(update={"max_steps": 5})
    for name in ("one", "two"):
        warm_start(model_dir, tmp_path / name, digit_problems(), config)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize("line", [b"not json", b'{"messages": []}', b"[1]", b'{"question": "1"}'])
def test_read_problems_names_the_line_when_it_is_unusable(tmp_path: Path, line: bytes) -> None:
    good = orjson.dumps(
        {"messages": [{"role": "user", "content": "1"}], "ground_truth": 1, "other": None}
    )
    file = tmp_path / "problems.jsonl"
    file.write_bytes(good + b"\n\n" + line)
    with pytest.raises(DatasetError, match=r"problems\.jsonl:3"):
        read_problems(file)
    file.write_bytes(good + b'\n{"question": "1", "answer": 1}')
    assert read_problems(file) == 2 * [Demonstration([{"role": "user", "content": "1"}], "1")]
