"""`rolloutmq train`: one rank of the trainer, rank 0 of one unless launched as several."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from buffer.errors import ConfigError
from buffer.imports import load_object
from buffer.redis.scripts import role_held
from buffer.run.open import open_store, own_run, server_url, wait_for_run
from producer_workers.follow_owner import OWNER
from rolloutmq.launch.create import create_again, create_run
from rolloutmq.launch.terms import keep_terms, terms_of
from rolloutmq.observers import observed
from rolloutmq.views.setting_view import override_lines

if TYPE_CHECKING:
    from buffer.run.run import Run
    from rolloutmq.config.config import Config

log = logging.getLogger("rolloutmq.trainer")

POLL_S = 0.2  # between two looks at the heartbeat of another trainer


def own_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def open_run(
    settings: Config,
    redis_url: str | None,
    metrics: str | None,
    *,
    take_over: bool,
    regenerate: bool,
) -> tuple[Run, Path]:
    """Return the run and its model folder; rank 0 creates a new run.

    `metrics`: the address on which the first rank of each machine serves metrics. `regenerate`:
    rank 0 clears the run on the server first, except after a restart by torchrun. Raises RoleHeld
    while another trainer is alive, unless `take_over`.
    """
    url = server_url(settings, redis_url)
    store = open_store(settings, url, name="rolloutmq-trainer", patient=True)
    model_dir = settings.model_folder
    if metrics is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        from rolloutmq.views.prometheus import serve_process

        serve_process("trainer", store, metrics)
    if own_rank():
        run = wait_for_run(store, settings.run.name)
        return run, model_dir
    by_hand = OWNER not in os.environ and not _restarts()  # nor restarted by `run`, or torchrun
    if regenerate and not _restarts():
        run = create_again(store, settings, model_dir, log.warning, take_over=take_over)
    else:
        if by_hand and not take_over and (found := own_run(store, settings)):
            # a live trainer refuses this one; the role of a dead one times out
            first = found.control.holder("trainer")
            while (holder := found.control.holder("trainer")).is_alive:
                if holder.seen_ms != first.seen_ms:
                    raise role_held("trainer", found.name, holder.silent_ms or 0)
                time.sleep(POLL_S)
        run = create_run(store, settings, model_dir, by_hand=by_hand)
    for change in run.changes:
        log.warning("continued with another config: %s", change)
    for line in override_lines(run.settings):
        log.info("set: %s", line)
    for warning in [] if OWNER in os.environ else settings.warnings():  # `run` has printed them
        log.warning(warning)
    return run, model_dir


def _restarts() -> int:
    """Return how often torchrun has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def train(run: Run, settings: Config, model_dir: Path, *, take_over: bool) -> bool:
    """Train as this rank; return whether rank 0 did not stop before the last step."""
    from consumer.handle.dead_letter_file import kept_dead_letters

    letters = nullcontext() if own_rank() else kept_dead_letters(run, settings.run.folder)
    with letters, nullcontext() if own_rank() else observed(run, "trainer", settings):
        if not settings.trainer.loop:
            return _train(run, settings, model_dir, take_over=take_over)
        loop = load_object(settings.trainer.loop, kind="loop of a trainer")
        from consumer.grpo.reporting.step_recorder import recorded

        with recorded(run, settings, model_dir):
            loop(run, settings, model_dir, take_over=take_over)
        return True


def _train(run: Run, settings: Config, model_dir: Path, *, take_over: bool) -> bool:
    """Train with the reference trainer, as `train` does."""
    from consumer.grpo.trainer import Trainer
    from consumer.grpo.trainer_rank import TrainerRank
    from consumer.handle.ranks import join

    ranks = join()
    transport = settings.weights.url or settings.policy.weights_transport
    on_one_node = ranks.size <= int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    if transport != "folder" and not on_one_node:
        raise ConfigError(
            f"weights that go through {transport} are collected on one machine, but the ranks "
            "of the trainer are on several",
            hint='set [policy] weights_transport = "folder", and weights_dir to a folder that all '
            "share",
        )
    if ranks.rank:
        rank = TrainerRank(run, settings, model_dir, ranks)
        _on_signals(rank.orders.stopped.set)
        rank.follow()
        return True
    terms = keep_terms(settings.run.folder, terms_of(settings, model_dir))
    trainer = Trainer(run, settings, model_dir, ranks, terms=terms)
    _on_signals(trainer.stop)
    if sys.stderr.isatty():  # a bar in place of a line per step
        trainer.shows_progress = True
        log.setLevel(logging.WARNING)
    if _restarts() and not take_over:
        # torchrun has ended the ranks before these, but the role is theirs until it times out
        trainer.consumer.role.wait_until_vacant(trainer.rank.orders.stopped)
    return trainer.fit(take_over=take_over)


def _on_signals(stop: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())
