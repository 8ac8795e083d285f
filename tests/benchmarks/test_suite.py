from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import sample
from benchmarks.asked import ROWS
from benchmarks.figure import Figure, Way, interleave, ratio
from benchmarks.machine import machine_facts
from benchmarks.plots import draw
from benchmarks.report import read_json, write_json, write_readme
from benchmarks.suite import SUITE, TINY, run_suite
from benchmarks.throughput import STREAM
from buffer.wire import group_bytes

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
def test_suite_names_the_slowest_call_of_the_scripts_that_scaling_runs(
    figures: list[Figure],
) -> None:
    assert {"take_batch"} <= {figure.name for figure in figures if figure.section == "slowest call"}


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
        *("throughput.png", "scaling.png", "scale.png", "pause.png", "stragglers.png")
    }


def test_sample_group_has_the_size_that_the_figures_speak_of() -> None:
    assert len(group_bytes.encode(sample.group("math-0000000003"))) == sample.GROUP_BYTES


def test_interleave_runs_the_ways_in_turns_and_leaves_out_the_first_round() -> None:
    order: list[str] = []
    ways = {name: Way(lambda _, name=name: order.append(name)) for name in "ab"}  # type: ignore[misc]
    spent = interleave(ways, 2)
    assert order == ["a", "b"] * 3
    assert {len(seconds) for each in (spent.wall, spent.cpu) for seconds in each.values()} == {2}


def test_ratio_compares_neighbours_in_time_when_the_machine_was_slow_for_a_round() -> None:
    assert ratio({"ours": [2.0, 20.0, 2.0], "theirs": [1.0, 10.0, 1.0]}, "ours", "theirs") == 0.5


@pytest.mark.parametrize(("better", "met"), [("more", False), ("less", True)])
def test_figure_is_met_on_the_better_side_of_its_target(better: str, met: bool) -> None:
    assert Figure("s", "n", 1.0, "x", 2.0, better).met is met
