"""[memory]: sizes that people write, and a budget that cannot hold a checkpoint interval is refused
(I12).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from buffer.config.memory_budget import MemoryNeed, MemorySection, estimate_group_bytes
from buffer.errors import ConfigError
from rolloutmq.config.config import Config
from rolloutmq.config.load import load_config

TEXT = Path(__file__).with_name("memory_config.toml").read_text(encoding="utf-8")


def load(folder: Path, *overrides: str) -> Config:
    path = folder / "run.toml"
    path.write_text(TEXT, encoding="utf-8")
    return load_config(path, overrides)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512", 512), ("8GiB", 8 * 2**30), ("1.5 MiB", 3 * 2**19), ("500MB", 500_000_000),
        ("2TB", 2 * 10**12), (" 7 B ", 7),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert MemorySection.model_validate({"budget_bytes": text}).budget_bytes == size


def test_marks_are_shares_of_the_budget(tmp_path: Path) -> None:
    limits = load(tmp_path).limits()
    assert (limits.low_bytes, limits.high_bytes) == (int(2**30 * 0.7), int(2**30 * 0.9))
    limits = load(tmp_path, 'memory.budget_bytes="2GiB"', "memory.low_water=0.5").limits(
        maxmemory_bytes=2**20
    )
    assert (limits.low_bytes, limits.high_bytes) == (2**30, int(2**31 * 0.9))


def test_without_a_budget_the_server_says_it_or_nobody(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TEXT.replace('budget_bytes = "1GiB"', ""), encoding="utf-8")
    config = load_config(path)
    assert (config.limits().low_bytes, config.limits().high_bytes) == (0, 0)
    assert config.limits(4 * 2**30).low_bytes == int(3 * 2**30 * 0.7)


def test_budget_that_cannot_hold_a_checkpoint_interval_is_refused_with_numbers(
    tmp_path: Path,
) -> None:
    load(tmp_path, "trainer.checkpoint_every_steps=17")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "trainer.checkpoint_every_steps=20")
    text = str(caught.value)
    for number in (
        "1.0 GiB",
        "40 batches of 100 groups",
        "checkpoint_every_steps",
        "budget_bytes",
        "group_bytes",
    ):
        assert number in text
    assert load(tmp_path, "trainer.checkpoint_every_steps=20", 'memory.group_bytes="100KiB"')
    assert load(tmp_path, "trainer.checkpoint_every_steps=20", 'memory.budget_bytes="2GiB"')


def test_what_the_error_asks_for_is_just_enough() -> None:
    memory = MemorySection()
    need = MemoryNeed(group_bytes=1000, batches=7, batch_size=3, in_flight=4)
    enough = 21_000 / 0.7
    assert need.problem(memory, int(enough) + 1) == ""
    assert "low_water" in need.problem(memory, int(enough) - 1)
    wide = MemoryNeed(group_bytes=1000, batches=1, batch_size=3, in_flight=40)
    assert wide.problem(memory, 43_000) == ""
    assert "in flight" in wide.problem(memory, 42_999)
    assert need.problem(memory, 0) == ""


def test_estimate_covers_a_group_as_large_as_it_may_be() -> None:
    # measured: 8 x 2,048 tokens with a text of 4 bytes per token, and a prompt of 512, are 201,811
    # bytes on the wire
    assert 201_811 < estimate_group_bytes(8, 2048, 512) < 201_811 * 1.1
    assert estimate_group_bytes(8, 2048, None) > estimate_group_bytes(8, 2048, 512)
