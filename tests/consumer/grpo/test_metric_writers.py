"""What TensorBoard and Weights & Biases hold after a trainer was killed and started again."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from buffer.errors import ConfigError
from consumer.grpo.reporting.metric_writers import open_writers
from rolloutmq.config.config import Config

EVIL = "</td><script>alert(1)</script>\n```\n# not a heading"

SAMPLE: dict[str, Any] = {
    "why": "best", "gid": "math-0000000007", "task": "math", "staleness": 1, "ground_truth": 2,
    "messages": [{"role": "user", "content": "What is 1 + 1?"}],
    "members": [{"index": 0, "status": "completed", "response": EVIL, "tokens": 3,
                 "reward": {"score": 1.0, "format": 0.5}, "finish_reason": "stop",
                 "spans": [{"start": 0, "length": 3, "version": 4, "lineage": "l0"}]}],
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "demo", "dir": tmp_path},
            "redis": {"url": "redis://:secret@host:1"},
            "tasks": {"math": {"judge": "exact_match", "dataset": {"kind": "jsonl", "path": "p"}}},
            "samples": {"report_every_steps": 3},
            "wandb": {"mode": "offline", "project": "sums"},
        }
    )


def train_twice(config: Config, name: str) -> None:
    """Report like a trainer that was killed after step 3, of which there is no checkpoint."""
    config = Config.model_validate(config.model_dump() | {"trainer": {"writers": [name]}})
    for first, steps in ((1, (1, 2, 3)), (3, (3, 4))):
        (writer,) = open_writers(config, first)
        for step in steps:
            writer.write(step, {"rewards/mean": step + first / 10})
            writer.write_samples(step, [{"step": step, **SAMPLE}])
        if first == 3:
            writer.write_evaluation(2, "quiz", {"eval/accuracy": 0.5})
        writer.close()


def test_tensorboard_holds_the_steps_of_the_weights_that_exist(
    config: Config, tmp_path: Path
) -> None:
    from tensorboardX.proto.event_pb2 import Event

    train_twice(config, "tensorboard")
    seen: list[tuple[int, str, Any]] = []
    for file in sorted((tmp_path / "tensorboard").iterdir()):
        data = file.read_bytes()
        at = 0
        while at < len(data):
            # a record: its length (8 bytes) and that one's checksum (4), then itself and its
            # checksum (4)
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
            if event.HasField("session_log"):
                seen = [entry for entry in seen if entry[0] < event.step]
            for value in event.summary.value:
                text = b"".join(value.tensor.string_val).decode()
                seen.append((event.step, value.tag, text or round(value.simple_value, 3)))
    scalars = [entry for entry in seen if isinstance(entry[2], float)]
    assert scalars == [
        (1, "rewards/mean", 1.1),
        (2, "rewards/mean", 2.1),
        (3, "rewards/mean", 3.3),
        (4, "rewards/mean", 4.3),
        (2, "eval/quiz/accuracy", 0.5),
    ]
    texts = {(step, tag): text for step, tag, text in seen if isinstance(text, str)}
    assert {step for step, tag in texts if tag.startswith("samples/best")} == {1, 3}
    (sample,) = [text for (step, tag), text in texts.items() if "samples" in tag and step == 3]
    assert all(f"    {line}" in sample.splitlines() for line in EVIL.splitlines())
    (settings,) = {text for (_, tag), text in texts.items() if tag.startswith("config")}
    assert '"project": "sums"' in settings
    assert "secret" not in settings


def test_wandb_gets_each_step_once_in_one_run(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = []
    opened: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        opened.append(options)
        nothing = lambda *_, **__: None  # noqa: E731
        return SimpleNamespace(log=rows.append, define_metric=nothing, finish=nothing)

    package = SimpleNamespace(init=init, Table=lambda columns, data: data)
    monkeypatch.setitem(sys.modules, "wandb", package)
    train_twice(config, "wandb")
    assert {(each["id"], each["name"], each["project"]) for each in opened} == {
        (opened[0]["id"], "demo", "sums")
    }
    assert len(opened) == 2
    assert b"secret" not in orjson.dumps(opened[0]["config"])
    means = [(row["train_step"], row["rewards/mean"]) for row in rows if "rewards/mean" in row]
    assert means == [(1, 1.1), (2, 2.1), (3, 3.1), (4, 4.3)]
    assert [row["train_step"] for row in rows if "eval/quiz/accuracy" in row] == [2]
    cells = next(row["samples"] for row in rows if "samples" in row)[0]
    assert {"math-0000000007", EVIL, "user: What is 1 + 1?", "weights 4"} <= {str(c) for c in cells}


def test_a_writer_that_is_not_installed_is_an_error(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb is not installed"):
        train_twice(config, "wandb")
