"""miles' own rollout function and samples on a run: `make test-trainers TRAINERS=miles`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

from tests.extensions.trainers import miles_process

# isort: split

from miles.rollout.fully_async_data_buffer import DataBufferConstructorInput, DataBufferInput
from miles.utils.types import AdapterRef, RewardSpec, Sample

from buffer.errors import WireError
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from rolloutmq.extensions.trainers.miles import (
    MilesVersions,
    RunDataBuffer,
    put_together,
    taken_apart,
)
from tests.extensions.trainers.miles_process import TRACKER, Prompts, arguments, finish
from tests.servers import Server
from tests.waits import until

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)

ROOT = Path(__file__).parents[2]
LAST = 9


def full_sample(index: int) -> Any:
    sample = finish(Sample(group_index=4, index=index, prompt=[{"role": "user", "content": "?"}]))
    sample.label = "42"
    sample.teacher_log_probs = [-0.5] * sample.response_length
    sample.rollout_routed_experts = np.ones((len(sample.tokens) - 1, 2, 1), np.int32)
    sample.adapter = AdapterRef("math", 1)
    sample.reward_spec = RewardSpec("dapo")
    sample.reward = {"score": 0.25, "why": "text"}
    sample.weight_versions = ["5", "7"]
    sample.status = Sample.Status.TRUNCATED
    sample.spec_info.completion_token_num = 3
    sample.train_metadata = {"loss": "sft"}
    return sample


def through_a_run(group: list[Any], versions: MilesVersions, now: MilesVersions) -> Any:
    states = taken_apart(group, "score", versions)
    sent = group_bytes.encode(RolloutGroup("miles-0000000001", "miles", states))
    return put_together(group_bytes.decode(sent), now).group


def plain(sample: Any) -> dict[str, Any]:
    fields: dict[str, Any] = sample.to_dict()
    experts = fields["rollout_routed_experts"]
    return fields | {"rollout_routed_experts": None if experts is None else experts.tolist()}


def test_a_sample_comes_back_as_it_was(server: Server) -> None:
    del server
    versions = MilesVersions(10, 2, "a")
    several = [[full_sample(0), full_sample(1)], full_sample(2)]
    several[0][1].tokens = [7, 9, *several[0][1].tokens[1:]]  # a prompt of its own
    several[0][1].rollout_routed_experts = None
    several[0][1].loss_mask = None
    back = through_a_run(several, versions, versions)
    assert [plain(each) for each in back[0]] == [plain(each) for each in several[0]]
    assert plain(back[1]) == plain(several[1])
    states = taken_apart(several, "score", versions)
    assert [state.oldest_version() for state in states] == [18, 18, 18]
    assert [state.reward for state in states] == [{"score": 0.25}] * 3
    # a later process began 2 updates later
    (later,) = through_a_run([full_sample(0)], versions, MilesVersions(14, 2, "b"))
    assert later.weight_versions == ["3", "5"]
    image = full_sample(0)
    image.multimodal_inputs = {"images": [object()]}
    with pytest.raises(WireError, match="multimodal_inputs"):
        taken_apart([image], None, versions)


def finished(number: int, status: Any = Sample.Status.COMPLETED, version: int = 1) -> Any:
    (prompts,) = Prompts(number).get_samples(1)
    group = [finish(sample, version) for sample in prompts]
    group[0].status = status
    return DataBufferInput(prompt_group=prompts, group=group)


def test_what_miles_would_not_train_is_filtered(
    server: Server, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", server.url)
    monkeypatch.setenv("ROLLOUTMQ_RUN", run_name)
    recycled: list[Any] = []
    args = arguments(tmp_path, rollout_batch_size=1, max_weight_staleness=1)

    async def scenario() -> dict[str, float]:
        buffer = RunDataBuffer(DataBufferConstructorInput(args, recycled.append))
        await buffer.put(finished(0, Sample.Status.ABORTED))
        await buffer.put(finished(1, version=1))
        await buffer.put(finished(2, version=3))
        third = asyncio.create_task(buffer.put(finished(3, version=4)))
        await asyncio.sleep(0.5)
        assert not third.done()  # the buffer is full
        got = await buffer.get(current_version=4)
        assert got.group[0].group_index == 2
        await third
        await buffer.put(finished(2, version=4))  # the same prompt
        metrics = buffer.get_metrics()
        await buffer._consumer.close()
        return metrics

    metrics = asyncio.run(scenario())
    assert len(recycled) == 1
    prefix = "rollout/fully_async/"
    assert metrics == {
        f"{prefix}aborted_groups_filtered": 1,
        f"{prefix}stale_groups_filtered": 1,
        f"{prefix}repeated_groups_dropped": 1,
        f"{prefix}queue_size": 1,
    }


def test_groups_outlive_the_process_that_made_them(
    server: Server, run_name: str, tmp_path: Path
) -> None:
    """A process is killed after a checkpoint; another one trains what it left, each group once."""
    command = [sys.executable, "-m", miles_process.__name__, str(tmp_path), str(LAST)]
    environment = os.environ | {"REDIS_URL": server.url, "ROLLOUTMQ_RUN": run_name}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=ROOT, env=environment)

    first = start()
    try:
        until(lambda: (tmp_path / TRACKER).exists() or first.poll() is not None, "a save")
    finally:
        first.kill()
        first.wait()
    saved = int((tmp_path / TRACKER).read_text())
    assert saved < LAST
    second = start()
    assert second.wait(120) == 0
    trained = json.loads((tmp_path / f"iter-{LAST}.json").read_text())["trained"]
    assert len(trained) == (LAST + 1) * 3
    groups = [facts[0][0] for _, facts in trained]
    assert len(set(groups)) == len(groups)
    for _, facts in trained:
        for group, index, tokens, logprobs in facts:
            again = finish(Sample(group_index=group, index=index))
            assert (tokens, logprobs) == (again.tokens, again.rollout_log_probs)
    later = {process for process, _ in trained[3 * (saved + 1) :]}
    assert later == {first.pid, second.pid}
    store = Store(server.url)
    run = Run.open(store, run_name)
    assert run.ledger.steps()[1] > saved + 1  # those of the checkpoint, and later ones
    assert run.account.fsck().clean
    store.close()
