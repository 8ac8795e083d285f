"""A rehearsal: a user's loop and judge go through a whole run in memory, and what fails there is told."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from buffer import Store
from buffer.rollout import RolloutState
from producer_workers import worker
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.engines.base import Engine, EngineDeadError
from producer_workers.engines.config import SimulatedConfig
from producer_workers.engines.distributions import Fixed
from producer_workers.engines.simulated import SimulatedEngine
from producer_workers.rehearsal import FIRST, RehearsalError, rehearse

ROOT = Path(__file__).parents[2]
SUMS = [{"question": f"{n} + {n} = ?", "answer": str(2 * n)} for n in range(5)]


class Polite(SingleTurnAgentLoop):
    """A loop of a user's: as the single turn, and then says goodbye."""

    async def generate_group(self, states: list[RolloutState], engine: Engine, gid: str) -> list[RolloutState]:
        for state in await super().generate_group(states, engine, gid):
            state.extra = {**state.extra, "goodbye": gid}
        return states


class Endless(Polite):
    async def generate_group(self, states: list[RolloutState], engine: Engine, gid: str) -> list[RolloutState]:
        await asyncio.sleep(3600)
        return states


def length(*, response: str, ground_truth: str, state: RolloutState) -> float:
    return float(len(response) + len(ground_truth))


def test_lines_of_the_readme_work_as_they_stand(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (lines,) = [found for found in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "rehearse" in found]
    script = tmp_path / "test_mine.py"
    script.write_text(lines, encoding="utf-8")
    code = f"import runpy; runpy.run_path({str(script)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("loop", [Polite, "tests.pipeline.test_rehearsal:Polite"])
def test_groups_come_back_in_the_order_of_the_problems(loop: Any) -> None:
    groups = rehearse(SUMS, judge=length, agent_loop=loop, samples=3)
    assert [group.states[0].ground_truth for group in groups] == [problem["answer"] for problem in SUMS]
    assert [group.scores.tolist() for group in groups] == [[32.0 + len(problem["answer"])] * 3 for problem in SUMS]
    assert {state.extra["goodbye"] for state in groups[0].states} == {groups[0].gid}


def test_a_rehearsal_repeats_itself_and_leaves_nothing_behind() -> None:
    first, second = (rehearse(SUMS, judge="exact_match") for _ in range(2))
    assert [g.response_ids.tolist() for g in first] == [g.response_ids.tolist() for g in second]
    store = Store("memory://rehearsal")
    assert list(store.control.scan_iter("rmq:*:payload:*")) == []
    store.close()


def broken(**_: Any) -> float:
    raise ValueError("no verifier here")


def test_what_the_judge_raises_is_told() -> None:
    with pytest.raises(RehearsalError, match="'broken' raised ValueError: no verifier here"):
        rehearse(SUMS, judge=broken)


def test_what_the_engine_raises_is_told() -> None:
    engine = SimulatedEngine(SimulatedConfig(token_s=Fixed(value=0.0), fail_every=1), FIRST)
    with pytest.raises(RehearsalError, match="as configured"):
        rehearse(SUMS, judge=length, engine=engine)


def test_an_engine_that_dies_ends_the_rehearsal() -> None:
    engine = SimulatedEngine(SimulatedConfig(token_s=Fixed(value=0.0), die_after=1), FIRST)
    with pytest.raises(EngineDeadError):
        rehearse(SUMS, judge=length, engine=engine)


def test_a_loop_without_end_is_an_error_that_says_where_groups_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "HAND_BACK_S", 0.1)
    with pytest.raises(RehearsalError, match=r"after 0.5 s; groups are \{'running': 5\}"):
        rehearse(SUMS, judge=length, agent_loop=Endless, timeout_s=0.5)
