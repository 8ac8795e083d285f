"""The harness finds builds with one line of a script gone, and nothing in this one. Minutes:
`pytest -m chaos`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from proofs.chaos.harness import ChaosRun, EmptyServerRun, Plan
from proofs.chaos.mutations import NAMES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", NAMES)
def test_a_build_without_a_line_is_caught(name: str, tmp_path: Path) -> None:
    plan = Plan(seed=4, seconds=50.0, faults=120, mutation=name)
    assert not ChaosRun(plan, tmp_path, print).run().clean


@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_this_build_is_clean(fsync: str, tmp_path: Path) -> None:
    plan = Plan(seed=2, seconds=45.0, faults=40, fsync=fsync, loses=fsync == "everysec")
    verdict = ChaosRun(plan, tmp_path, print).run()
    assert verdict.clean, verdict


@pytest.mark.parametrize("servers", ["sentinel", "cluster"])
@pytest.mark.parametrize("wait_replicas", [0, 1])
def test_this_build_is_clean_when_primaries_are_replaced(
    servers: str, wait_replicas: int, tmp_path: Path
) -> None:
    plan = Plan(seed=2, seconds=90.0, faults=60, servers=servers, wait_replicas=wait_replicas)
    verdict = ChaosRun(plan, tmp_path, print).run()
    assert verdict.clean, verdict


def test_an_empty_server_is_noticed_and_filled_again_by_name(tmp_path: Path) -> None:
    verdict = EmptyServerRun(Plan(seed=3, seconds=20.0, faults=0), tmp_path, print).run()
    assert verdict.clean, verdict
