"""`rolloutmq simulate`: needs no server, says what it would choose, and the same to programs."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tests.rolloutmq.conftest import in_process

SMALL = ("simulate", "--workers", "2", "--sequences", "16", "--batch-size", "8", "--steps", "6")


def test_simulate_prints_every_setting_and_what_it_would_choose() -> None:
    done = in_process(
        *SMALL, "--staleness", "0", "--staleness", "1", "--pause", "keep", "--pause", "partial"
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines) <= 80
    # staleness 0 is there once: nothing runs while its weights are updated
    assert [line[2:].split()[:3] for line in lines[1:4]] == [
        ["0,", "0", "keep"],
        ["1,", "1", "keep"],
        ["1,", "1", "partial"],
    ]
    assert [line[0] for line in lines[1:4]].count(">") == 1
    assert "[policy]" in lines


def test_simulate_tells_programs_the_same(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.jsonl"
    trace.write_text("\n".join(["100"] * 9 + ['{"seconds": 100}']), encoding="utf-8")
    done = in_process(*SMALL, "--trace", str(trace), "--json")
    document = orjson.loads(done.stdout)
    assert len(document["settings"]) == 13
    assert document["chosen"] in document["settings"]
    assert document["reasons"]


@pytest.mark.parametrize(
    "flags", [("--pause", "never"), ("--trace", "/no/such/file"), ("--workers", "0")]
)
def test_simulate_refuses_what_cannot_be_asked(flags: tuple[str, str]) -> None:
    done = in_process(*SMALL, *flags)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
