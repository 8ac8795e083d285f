from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from buffer.wire.rollout import RolloutState, Status
from buffer.wire.sampling import SampleParams
from tests.pipeline.talker import TURNS, live
from tests.pipeline.yard import Yard
from tests.waits import DEADLINE_S
from tests.warm_process import start_program

AGENTS = 2
MOST_DEATHS = 12


def notes(folder: Path, kind: str) -> list[Any]:
    file = folder / kind
    return [orjson.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []


def dies(yard: Yard, folder: Path, worker: str, death: str) -> bool:
    """Run a worker process until it kills itself, and take back what it held, or to the end."""
    words = (yard.store.url, yard.run.name, worker, str(folder), death)
    process = start_program(live, *words)
    process.join(DEADLINE_S)
    if process.exitcode == 0:
        return False
    assert process.exitcode == -signal.SIGKILL
    yard.expire_lease(worker)
    yard.check()
    return True


def trained(states: list[RolloutState]) -> list[list[list[int]]]:
    turns = []
    for state in states:
        assert state.prompt_ids is not None
        ids = [*state.prompt_ids.tolist(), *state.response_ids.tolist()]
        start = len(state.prompt_ids)
        for span in state.spans:
            end = start + span.start + span.length
            turns.append([ids[: end - span.length], ids[end - span.length : end]])
        mask = state.response_mask
        count = len(state.response_ids) if mask is None else np.count_nonzero(mask)
        assert count == sum(span.length for span in state.spans)
    return turns


@pytest.mark.parametrize("make_yard", ["valkey"], indirect=True)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sampled", "told"])
def test_agents_of_killed_workers_go_on_and_each_turn_that_they_got_is_trained_once(
    make_yard: Any, kind: str, tmp_path: Path
) -> None:
    """Each worker dies at its second turn: so the deaths are at each turn of one agent or two."""
    # a turn that was told is kept, so such a life uses up no try; what was only sampled may be lost
    yard: Yard = make_yard(max_tries=2 if kind == "told" else 20)
    params = SampleParams(max_tokens=200, seed=1)
    states = [
        RolloutState(
            index=n,
            messages=[{"role": "user", "content": f"question{n}"}],
            prompt_ids=np.arange(3),
            sample_params=params,
        )
        for n in range(AGENTS)
    ]
    (gid,) = yard.enqueue_states(states)
    deaths = 0
    while dies(yard, tmp_path, f"w{deaths}", f"{kind} 2" if deaths < MOST_DEATHS else "never"):
        deaths += 1
    assert deaths > 1

    group = yard.group(gid)
    assert group.status is Status.COMPLETED
    assert {state.index for state in group.states} == set(range(AGENTS))
    assert [state.reward for state in group.states] == [{"score": 1.0}] * AGENTS
    turns = trained(group.states)
    sampled = notes(tmp_path, "sampled")
    assert len(turns) == TURNS * AGENTS
    assert all(turns.count(turn) == 1 and turn in sampled for turn in turns)
    told = notes(tmp_path, "told")
    texts = ["".join(chr(32 + token) for token in ids).strip() for _, ids in turns]
    assert all(text.strip() in texts for _, text in told)
    # an agent whose worker died behind a kept turn goes on from it, though it was never told
    assert max(Counter(session for session, _ in told).values()) <= TURNS
    # what no agent had got was sampled again
    assert len(sampled) - len(turns) <= 2 * deaths
    yard.check()
    yard.run.payloads.collect()
    # what a script has not accepted expires
    left = yard.store.client.keys(yard.run.keys.payload(gid, "*-turns*"))
    assert all(yard.store.client.ttl(key) > 0 for key in left)
