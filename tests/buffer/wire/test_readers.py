from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest

from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status

ROOT = Path(__file__).parents[3]
GOLDEN = sorted((ROOT / "tests" / "buffer" / "golden").glob("*.msgpack"))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Every length that msgpack writes with a head of its own, up to 32 bits."""
    rewards = {"score": -0.125, "ratio": 1 / 3, "big": 2.0**40}
    states = [
        RolloutState(
            index=i, prompt_ids=np.arange(70_000), response="é" * 999 * i, response_ids=np.arange(999 * i),
            logprobs=np.full(999 * i, -0.5), status=Status.COMPLETED, reward=rewards,
            extra={"int": [-1, -33, -200, -40_000, -(2**40), 128, 300, 70_000, 2**40], "list": list(range(20))},
        )
        for i in range(17)
    ]  # fmt: skip
    path = tmp_path / "large.msgpack"
    path.write_bytes(group_bytes.encode(RolloutGroup("math-0000000001", "math", states)))
    return path


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
@pytest.mark.parametrize("which", [*GOLDEN, None], ids=lambda path: path.stem if path else "large")
def test_a_reader_in_javascript_finds_the_same(which: Path | None, large: Path) -> None:
    path = which or large
    reader = ROOT / "tests" / "readers" / "read_group.mjs"
    found = orjson.loads(
        subprocess.run(["node", reader, path], capture_output=True, check=True, timeout=400).stdout
    )
    group = group_bytes.decode(path.read_bytes())
    assert (found["gid"], found["task"], found["prompt"]) == (
        group.gid,
        group.task,
        group.prompt_ids.tolist(),
    )
    rollouts = [
        (
            s.index, s.status, s.response, s.reward, s.response_ids.tolist(),
            float(s.logprobs.sum(dtype="f8")),
        )
        for s in group.states
    ]  # fmt: skip
    assert [tuple(row.values()) for row in found["rollouts"]] == rollouts


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_reader_in_python_works_without_this_project(path: Path) -> None:
    program = ROOT / "tests" / "foreign" / "read_group.py"
    words: list[str | Path] = [sys.executable, "-I", program, path]
    said = subprocess.run(words, capture_output=True, check=True, timeout=400, text=True).stdout
    expected = [
        f"{s.index} {s.status} {s.reward} {s.response_ids.tolist()}"
        for s in group_bytes.decode(path.read_bytes()).states
    ]
    assert said.splitlines() == expected
