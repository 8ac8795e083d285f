from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sample
from benchmarks.asked import ROWS
from benchmarks.fan_out import LATENCY_S, Spread
from benchmarks.figure import Figure, Way, interleave, ratio
from benchmarks.machine import machine_facts
from benchmarks.peers.__main__ import Size, measured, put_and_take
from benchmarks.peers.peer import Row
from benchmarks.peers.redis_peers import Plain
from benchmarks.peers.table import table
from benchmarks.plots import draw
from benchmarks.report import read_json, write_json, write_readme
from benchmarks.server import memory_server
from benchmarks.suite import SUITE, TINY, run_suite
from benchmarks.throughput import STREAM

MARKED = "before\n<!-- figures: written by `make bench` -->\nold\n<!-- end of figures -->\nafter\n"
NOT_IN_A_TINY_RUN = {
    row.what for row in ROWS if row.benchmark in ("idle", "engine", "scale", "scaling", "pause")
}
"""Rows whose sizes are those of the full run, or that need vLLM."""


@pytest.fixture(scope="module")
def figures() -> list[Figure]:
    return list(run_suite(list(SUITE), TINY))


@pytest.mark.slow
def test_suite_compares_ours_with_redis_and_pipelinerl(figures: list[Figure]) -> None:
    for section in ("put, in memory", "take, in memory", "put, durable", "take, durable"):
        names = {figure.name for figure in figures if figure.section == section}
        assert {"ours", STREAM} < names
        assert any(name.startswith("ours / ") for name in names)


@pytest.mark.slow
def test_report_holds_every_figure_when_it_is_written(
    figures: list[Figure], tmp_path: Path
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(MARKED, encoding="utf-8")
    write_json(figures, machine_facts(), tmp_path / "figures.json")
    write_readme(figures, machine_facts(), readme)
    draw(figures, tmp_path)
    again, facts = read_json(tmp_path / "figures.json")
    assert [figure.name for figure in again] == [figure.name for figure in figures]
    assert [figure.met for figure in again] == [figure.met for figure in figures]
    assert facts == machine_facts()
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    missing = {row.what for row in ROWS if row.what not in text}
    assert missing <= NOT_IN_A_TINY_RUN
    assert {path.name for path in tmp_path.glob("*.png")} == {
        *("throughput.png", "scaling.png", "scale.png", "pause.png", "stragglers.png"),
        "tokens.png",
    }


def test_interleave_runs_the_ways_in_turns_and_leaves_out_the_first_round() -> None:
    order: list[str] = []
    ways = {name: Way(lambda _, name=name: order.append(name)) for name in "ab"}  # type: ignore[misc]
    spent = interleave(ways, 2)
    assert order == ["a", "b"] * 3
    assert {len(seconds) for each in (spent.wall, spent.cpu) for seconds in each.values()} == {2}


def test_ratio_compares_neighbours_in_time_when_the_machine_was_slow_for_a_round() -> None:
    assert ratio({"ours": [2.0, 20.0, 2.0], "theirs": [1.0, 10.0, 1.0]}, "ours", "theirs") == 0.5


@pytest.mark.parametrize("receivers", [1, 2, 9, 125])
def test_times_are_those_of_the_busiest_network_card(receivers: int) -> None:
    gigabytes, gbit_s = 6.4, 80.0
    once_s, chunk_s = 0.64, 0.0064
    flat = Spread(receivers, receivers).seconds(gigabytes, gbit_s)
    assert flat == pytest.approx(receivers * once_s + LATENCY_S)
    chain = Spread(receivers, 1).seconds(gigabytes, gbit_s)
    assert chain == pytest.approx(once_s + (receivers - 1) * chunk_s + receivers * LATENCY_S)
    tree = Spread(receivers, 2).seconds(gigabytes, gbit_s)
    assert min(2, receivers) * once_s < tree <= 2 * once_s + 7 * (2 * chunk_s + LATENCY_S)


SMALL = Size("small, 2 a call", sample.Shape(2, 8, 200), 4, 2)


def test_queues_that_are_not_installed_are_left_out_and_the_others_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = list(table(list(measured(1, [SMALL]))))
    left_out = capsys.readouterr().err
    for name in ("ours", "ours, durable", "SET x8, MGET x16", "PipelineRL's stream"):
        assert any(line.startswith(f"| {name} |") for line in lines)
    assert "TransferQueue is left out: ModuleNotFoundError" in left_out


def test_a_queue_that_returns_other_values_is_refused() -> None:
    class Lossy(Plain):
        def rows(self, taken: Any) -> Iterator[Row]:
            for row in super().rows(taken):
                yield row._replace(logprobs=row.logprobs.astype("f2"))

    with memory_server() as server, pytest.raises(AssertionError, match="other values"):
        put_and_take(Lossy(server), [[sample.group("math-0000000000", SMALL.shape)]])
