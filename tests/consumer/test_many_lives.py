"""A trainer is killed between any two lines, and loses checkpoints and server state as well."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tests.consumer.many_lives import main
from tests.consumer.warm_process import run_in_warm_process


@pytest.mark.parametrize(("seed", "lives", "ranks"), [(4, 4, "1"), (22, 5, "2,4,1,2")])
def test_weights_are_those_of_the_surviving_batches_whatever_killed_the_trainer(
    model_dir: Path, tmp_path: Path, seed: int, lives: int, ranks: str
) -> None:
    """Check that no group is trained twice, none that was committed is missing, and batches repeat.

    More seeds, by hand: `python -m tests.consumer.many_lives FOLDER MODEL SEED LIVES RANKS`.
    """
    sizes = [int(size) for size in ranks.split(",")]
    printed = run_in_warm_process(tmp_path, main, tmp_path / "lives", model_dir, seed, lives, sizes)
    report = orjson.loads(printed.splitlines()[-1])
    assert report["deaths"] > 0
    assert report["moved"] > 1e-3
    # several ranks add up gradients in another order
    assert report["differs"] <= (0.0 if ranks == "1" else 1e-5)
