from __future__ import annotations

from pathlib import Path

from rolloutmq.config.kept_config import differences, keep_config, read_config
from rolloutmq.config.load import load_config

CONFIG = """
run = { name = "NAME", dir = "DIR" }
redis.url = "redis://me:secret1@host:6379"
weights.url = "file:///tmp/weights"
plan.steps = 5
engine = { kind = "http", url = "http://me:secret2@host:1", api_key = "secret3" }

[tasks.sums]
judge = "reasoning_gym"
dataset = { kind = "reasoning_gym", name = "chain_sum", size = 10 }
"""


def keep(folder: Path, *overrides: str) -> dict[str, tuple[object, str]]:
    folder.mkdir()
    file = folder / "my.toml"
    file.write_text(CONFIG.replace("NAME", folder.name).replace("DIR", str(folder)))
    keep_config(load_config(file, overrides), file, overrides)
    file.unlink()  # what was kept does not need it
    return {key.name: (key.value, key.source) for key in read_config(folder)}


def test_each_key_is_kept_with_its_source_and_without_secrets(tmp_path: Path) -> None:
    keys = keep(tmp_path / "a", "plan.steps=7", "tasks.sums.dataset={kind='jsonl', path='x.jsonl'}")
    assert keys["plan.steps"] == (7, "--set")
    assert keys["tasks.sums.judge"] == ("reasoning_gym", "file")
    assert keys["tasks.sums.dataset.path"] == ("x.jsonl", "--set")
    assert keys["plan.batch_size"][1] == keys["tasks.sums.agent_loop"][1] == "default"
    text = (tmp_path / "a" / "config.json").read_text()
    assert not any(f"secret{n}" in text for n in (1, 2, 3))


def test_runs_differ_in_keys_that_have_other_values_and_not_in_their_names(tmp_path: Path) -> None:
    keep(tmp_path / "a")
    keep(tmp_path / "b", "plan.steps=7")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text('[["plan.steps", 5')  # its writer's disk was full
    a, b, c = (tmp_path / name for name in "abc")
    assert differences({"a": a, "b": b}) == [("plan.steps", [5, 7])]
    assert differences({"a": a, "again": a}) == []
    assert differences({"c": c, "a": a, "b": b}) == [("plan.steps", [None, 5, 7])]
