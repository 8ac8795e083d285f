"""SkyRL's own trainer loop on a run: `make test-trainers TRAINERS=skyrl`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffer.ids import group_id
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire import group_bytes
from buffer.wire.rollout import FIRST_WEIGHTS
from tests.consumer.handle.crew import answer, at_work, prompt
from tests.servers import Server
from tests.waits import until

pytest.importorskip("skyrl")

from tests.extensions.trainers import skyrl_process

# isort: split

from skyrl.train.generators.utils import prepare_generator_input
from skyrl.train.utils.callbacks import CallbackInput

from buffer.errors import ConfigError
from buffer.weights.shared_folder import FolderSender
from rolloutmq.extensions.trainers.skyrl import RunGenerator

ROOT = Path(__file__).parents[2]
STEPS, GROUPS, MEMBERS = 5, 3, 4


def expected(draw: int) -> list[dict[str, Any]]:
    """Return the rows of a draw as the crew makes them, with scores of 0, 1, 0, 1."""
    group = answer(group_bytes.decode(prompt(group_id("math", draw))), FIRST_WEIGHTS)
    return [
        {
            "tokens": [*map(int, group.prompt_ids), *map(int, state.response_ids)],
            "response": len(state.response_ids),
            "mask": [1.0] * len(state.response_ids),
            "logprobs": state.logprobs.tolist(),
            "is_better": bool(state.index % 2),
        }
        for state in group.states
    ]


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_a_batch_that_skyrl_cannot_compare_is_refused(
    server: Server, run_name: str, tmp_path: Path
) -> None:
    store = Store(server.url)
    limits = RunLimits(steps=1, batch_size=GROUPS, tasks={"math": TaskLimits()})
    run = Run.create(store, run_name, "0" * 32, limits)
    rollouts = RunGenerator(run, FolderSender(tmp_path / "weights"))
    cfg = skyrl_process.configuration(tmp_path, 1)
    trainer: Any = SimpleNamespace(cfg=cfg, dispatch=skyrl_process.Dispatch(), tokenizer=None)
    rows = [skyrl_process.Prompts()[index] for index in range(GROUPS)]

    def ask(members: int, phase: Any) -> Any:
        given, _ = prepare_generator_input(rows, members, {}, "none", phase, 1)
        return asyncio.run(rollouts.generate(given))

    with pytest.raises(ConfigError, match="continues from step 3"):
        rollouts.on_train_start(trainer, CallbackInput(3, 0, 1, 1), None)
    with at_work(run, math=GROUPS):
        rollouts.on_train_start(trainer, CallbackInput(0, 0, 1, 1), None)
        with pytest.raises(ConfigError, match="evaluation"):
            ask(MEMBERS, "eval")
        with pytest.raises(ConfigError, match="SkyRL expects"):
            ask(MEMBERS + 1, "train")
        assert len(ask(MEMBERS, "train")["response_ids"]) == GROUPS * MEMBERS
        rollouts.on_train_end(trainer, CallbackInput(1, 0, 1, 1), None)
    store.close()


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_a_killed_trainer_trains_every_group_once(
    server: Server, run_name: str, tmp_path: Path
) -> None:
    store = Store(server.url)
    tasks = {"math": TaskLimits()}
    limits = RunLimits(steps=STEPS, batch_size=GROUPS, tasks=tasks, stale_threshold=2)
    run = Run.create(store, run_name, "0" * 32, limits)
    command = [
        sys.executable, "-m", "tests.extensions.trainers.skyrl_process", server.url, run_name,
    ]  # fmt: skip
    command += [str(tmp_path), str(STEPS)]
    with at_work(run, math=STEPS * GROUPS):
        first = subprocess.Popen(command, cwd=ROOT)
        try:
            until(lambda: run.ledger.steps()[1] >= 2 or first.poll() is not None, "a commit")
        finally:
            first.kill()
            first.wait()
        assert run.ledger.steps()[1] < STEPS
        again = subprocess.Popen(command, cwd=ROOT)
        assert again.wait(300) == 0
    file = tmp_path / "checkpoints" / f"global_step_{STEPS}" / "policy" / "trained.json"
    trained = json.loads(file.read_text(encoding="utf-8"))
    assert len(trained) == STEPS * GROUPS * MEMBERS
    draws = {tuple(expected(draw)[0]["tokens"]): draw for draw in range(5 * STEPS * GROUPS)}
    found = [draws[tuple(trained[row]["tokens"])] for row in range(0, len(trained), MEMBERS)]
    assert len(set(found)) == STEPS * GROUPS
    assert trained == [row for draw in found for row in expected(draw)]
    assert run.ledger.steps()[:2] == (STEPS, STEPS)
    assert run.control.state().weights.version == STEPS
    assert run.account.fsck().clean
    store.close()
