"""Teachers in a whole run: what is trained has the columns of a forward pass, though workers die.

Processes, models and the server are real.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer.control.control import Mode
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from tests.consumer.grpo.models.tiny import build_model
from tests.pipeline.site import Site
from tests.waits import until

STEPS = 4
TEACHERS = Path(__file__).with_name("whole_run.toml").read_text(encoding="utf-8")


@pytest.fixture
def big(tmp_path: Path) -> Path:
    (tmp_path / "big").mkdir()
    return build_model(tmp_path / "big", seed=5)


@pytest.fixture
def site(make_site: Callable[..., Site], big: Path) -> Site:
    site = make_site(steps=STEPS, held=1)
    with site.config.open("a", encoding="utf-8") as config:
        config.write(TEACHERS.format(big=big))
    return site


@pytest.mark.slow
def test_killed_workers_and_pauses_cost_no_group_and_change_no_column(
    site: Site, big: Path
) -> None:
    run = site.start("run")
    site.until_held()
    with closing(Store(site.server.url, deadline_s=400.0)) as store:
        opened = Run.open(store, site.name)
        for _ in range(2):
            site.let(1)
            kill_worker(opened)
            site.until_held()
        opened.control.set_mode("operator", Mode.ABORT)
        site.until(lambda: not opened.account.totals().leases, "the pause")
        assert run.exit_code is None
        site.let_go()
        opened.control.set_mode("operator", Mode.RUN)
    assert run.wait() == 0, site.words()
    site.check()
    groups = site.trained()
    assert len(groups) == 4 * STEPS
    models = {"big": big, "ref": site.model}
    for name, folder in models.items():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for group in groups:
            check_columns(group, name, model, top_k=3 if name == "big" else 0)


def kill_worker(run: Run) -> None:
    """Kill a worker that samples groups or asks its teachers; the launcher starts it again."""

    def holding() -> list[str]:
        return [each.id for each in run.fleet.workers() if each.holds]

    worker = until(holding, "a worker that holds groups")[0]
    pid: Any = run.store.client.hget(run.keys.worker(worker), "pid")
    os.kill(int(pid), signal.SIGKILL)


def check_columns(group: RolloutGroup, teacher: str, model: Any, top_k: int) -> None:
    assert {"teacher_logprobs/big", "teacher_logprobs/ref"} <= group.columns.keys()
    start = len(group.prompt_ids)
    for state in group.states:
        text = np.concatenate([group.prompt_ids, state.response_ids]).astype(np.int64)
        with torch.no_grad():
            logits = model(torch.tensor(text[None])).logits[0]
        logprobs = torch.log_softmax(logits, -1)[start - 1 : -1].numpy()
        own = logprobs[np.arange(len(state.response_ids)), state.response_ids]
        assert state.teacher_logprobs is not None
        assert np.abs(state.teacher_logprobs[teacher] - own).max() < 1e-4
        tops = state.teacher_top_logprobs or {}
        assert (teacher in tops) == bool(top_k)
        if top_k:
            best = np.sort(logprobs)[:, ::-1][:, :top_k]
            assert np.abs(tops[teacher] - best).max() < 1e-4
            assert state.teacher_top_ids is not None
            named = np.take_along_axis(logprobs, state.teacher_top_ids[teacher].astype(np.int64), 1)
            assert np.abs(named - best).max() < 1e-4
