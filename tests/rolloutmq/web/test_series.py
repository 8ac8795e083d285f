from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import ConfigError
from rolloutmq.web import watcher
from rolloutmq.web.run_routes import RunRoutes
from rolloutmq.web.series import Mark, RunSeries, run_folders, thinned
from rolloutmq.web.watcher import LiveRecord
from tests.rolloutmq.web.test_charts import log_steps

VALUES = st.one_of(st.none(), st.floats(-1e6, 1e6))


@given(st.lists(VALUES, min_size=1, max_size=300), st.integers(2, 60))
def test_a_thinned_table_is_short_and_has_every_extreme(
    values: list[float | None], most: int
) -> None:
    rows = len(values)
    table = {"x": list(range(rows)), "ended_s": [None] * rows, "columns": {"m": values}}
    made = thinned(table, most)
    assert len(made["x"]) == len(made["ended_s"]) == len(made["columns"]["m"]) <= max(most, 2)
    assert made["x"] == sorted(set(made["x"]))
    known = [value for value in values if value is not None]
    kept = [value for value in made["columns"]["m"] if value is not None]
    assert (min(kept, default=None), max(kept, default=None)) == (
        min(known, default=None),
        max(known, default=None),
    )


def joined(parts: list[dict[str, Any]]) -> list[int]:
    """What a browser holds after these events."""
    held: list[int] = []
    for part in parts:
        held = [*([] if part.get("whole") else held), *part.get("steps", {"x": []})["x"]]
    return held


def test_what_is_added_makes_the_whole_also_after_a_restart_of_the_trainer(tmp_path: Path) -> None:
    series = RunSeries(tmp_path)
    mark = Mark()
    parts = []
    for first, last, lineage in ((1, 2, "l1"), (3, 3, "l1"), (4, 3, "l1"), (2, 3, "l2")):
        log_steps(tmp_path, [0.5] * (last + 1 - first), first, lineage)
        series.refresh()
        added, mark = series.since(mark)
        parts.append(added)
        whole, _ = series.since(Mark())
        assert joined(parts) == whole["steps"]["x"]
    assert joined(parts) == [1, 2, 3]
    assert parts[2] == {}
    # the log of another run in the same folder
    (tmp_path / "steps.jsonl").unlink()
    log_steps(tmp_path, [0.9])
    series.refresh()
    added, _ = series.since(mark)
    assert (added["whole"], added["steps"]["x"]) == (True, [1])


def test_the_live_record_is_bounded_and_spans_all_of_its_time() -> None:
    record = LiveRecord()
    for second in range(20_000):
        record.add(1000 * second, {"tokens_per_s": float(second)})
    rows = record.since(0)["x"]
    assert len(rows) <= watcher.MOST_ROWS
    assert rows[0] < 60
    assert rows[-1] > 19_900
    gaps = [after - before for before, after in pairwise(rows)]
    assert max(gaps) <= 40


def test_only_folders_of_runs_beside_this_one_are_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        log_steps(tmp_path / name, [0.1])
    (tmp_path / "c").mkdir()
    assert list(run_folders(tmp_path / "c")) == ["c", "a", "b"]
    assert run_folders(None) == {}
    routes = RunRoutes(None, None, tmp_path / "a", None)  # type: ignore[arg-type]
    for name in ("..", "../..", "c", "", "a/../../x"):
        with pytest.raises(ConfigError, match="no run"):
            routes._series_of(name)
