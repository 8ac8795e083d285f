"""`rolloutmq run` while its keys are damaged, and what a user does then. Minutes: `pytest -m chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from buffer.redis.keys import Keys
from proofs.chaos.damaged_keys import damage
from tests.pipeline.site import Site

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

KEYS = (
    ("control", "deleted"), ("meta", "deleted"), ("ledger:train", "deleted"),
    ("jobs:sums:fresh", "retyped"), ("leases", "retyped"), ("pool:sums:completed", "retyped"),
    ("report", "retyped"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "way"), KEYS)
def test_a_launched_run_ends_with_the_key_is_made_again_and_finishes(
    name: str, way: str, tiny_model: Path, tmp_path: Path
) -> None:
    site = Site(tmp_path / "site", tiny_model, steps=12, held=2)
    try:
        launched = site.start("run")
        site.until_held()
        key = Keys(site.name).prefix + name
        with site.server.connect() as client:
            damage(client, key, way, is_string=False)
        site.let_go()
        code = launched.wait()
        assert "Traceback" not in site.words(), site.words()
        is_named = key in launched.said() or way == "retyped"  # which fsck names
        assert code == 0 or (code == 5 and is_named), site.words()
        again = site.start("run", "--regenerate")
        assert again.wait() == 0
        site.check(is_regenerated=True)
    finally:
        site.close()
