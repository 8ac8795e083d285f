from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.errors import ConfigError
from consumer.grpo.reporting.metric_writers import open_writers
from rolloutmq.config.config import Config
from tests.waits import until

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
        writer, _ = open_writers(config, first)  # the other is the sample log
        for step in steps:
            writer.write(step, {"rewards/mean": step + first / 10})
            writer.write_samples(step, [{"step": step, **SAMPLE}])
        if first == 3:
            writer.write_evaluation(2, "quiz", {"eval/accuracy": 0.5})
        writer.close()
        # the names of the folders of W&B have a resolution of one second
        time.sleep(1.1 if name == "wandb" and first == 1 else 0)


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
        (1, "rewards/mean", 1.1), (2, "rewards/mean", 2.1), (3, "rewards/mean", 3.3),
        (4, "rewards/mean", 4.3), (2, "eval/quiz/accuracy", 0.5),
    ]  # fmt: skip
    texts = {(step, tag): text for step, tag, text in seen if isinstance(text, str)}
    assert {step for step, tag in texts if tag.startswith("samples/best")} == {1, 3}
    (sample,) = [text for (step, tag), text in texts.items() if "samples" in tag and step == 3]
    assert all(f"    {line}" in sample.splitlines() for line in EVIL.splitlines())
    (settings,) = {text for (_, tag), text in texts.items() if tag.startswith("config")}
    assert '"project": "sums"' in settings
    assert "secret" not in settings


def test_wandb_holds_each_step_once_in_one_run(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train_twice(config, "wandb")

    def read() -> list[Any]:
        """Read all records, once a process of W&B has written both runs to their ends."""
        files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        records = [record for file in files for record in wandb_records(file.read_bytes())]
        ends = [record for record in records if record.WhichOneof("record_type") == "exit"]
        return records if len(ends) == 2 else []

    until(read, "W&B has written both runs")
    records = read()
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.display_name, run.project) for run in runs} == {
        (runs[0].run_id, "demo", "sums")
    }
    assert all(b"secret" not in record.SerializeToString() for record in records)
    assert any("batch_size" in update.value_json for update in runs[0].config.update)
    rows = [
        {item.key or "/".join(item.nested_key): orjson.loads(item.value_json) for item in items}
        for record in records
        if (items := record.history.item)
    ]
    means = [(row["train_step"], row["rewards/mean"]) for row in rows if "rewards/mean" in row]
    assert means == [(1, 1.1), (2, 2.1), (3, 3.1), (4, 4.3)]
    assert [row["train_step"] for row in rows if "eval/quiz/accuracy" in row] == [2]
    tables = list(tmp_path.glob("wandb/offline-run-*/files/media/table/*.json"))
    cells = orjson.loads(tables[0].read_bytes())["data"][0]
    assert {"math-0000000007", EVIL, "user: What is 1 + 1?", "weights 4"} <= {str(c) for c in cells}


def wandb_records(data: bytes) -> Iterator[Any]:
    """Yield the records of an offline file, which is a log in blocks of 32 KiB (LevelDB's)."""
    from wandb.proto.wandb_internal_pb2 import Record

    whole = b""
    at = 7
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        kind = data[at + 6]
        whole = (b"" if kind in (1, 2) else whole) + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield Record.FromString(whole)


def test_a_writer_that_is_not_installed_is_an_error(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb"):
        train_twice(config, "wandb")
