"""Keys of a live run are damaged one by one, and each time the run is made again from its checkpoint.

work ─▶ damage one key ─▶ the trainer ends ─▶ --regenerate, while all others still work ─▶ they end
  ▲                                                                                           │
  └──── start again ◀──── the account is judged ◀──── stop ◀──── start again, and train ◀─────┘
"""

from __future__ import annotations

import time
from pathlib import Path

from buffer.errors import RolloutMQError
from buffer.ledger.position import Position
from buffer.maintenance.regeneration import Regeneration
from buffer.redis.store import Store
from buffer.run import Run
from consumer.grpo.checkpoint import CheckpointFolder
from tests.chaos.damage_run import CLIENTS, DamageRun, Trial
from tests.chaos.plan import RUN

OTHERS = CLIENTS[1:]


class RegenerationRun(DamageRun):
    """Does what --regenerate does after each trial, whether fsck finds something or not."""

    def _bring_back(self, trial: Trial, before: dict[Path, int], since: float) -> None:
        self._stop(trial, CLIENTS[:1])
        self._regenerate(trial, since)
        self._stop(trial, OTHERS)
        self._read_logs(trial, before)
        if trial.problems:
            return
        self._start_again(trial)
        self._stop(trial)
        with self._opened() as run:
            trial.problems += [found.text for found in run.account.fsck().damage[:3]]
        trial.problems += self._account()[:3]
        if not trial.problems:
            self._start_again(trial)

    def _regenerate(self, trial: Trial, since: float) -> None:
        checkpoints = CheckpointFolder(self.folders.checkpoints)
        steps = checkpoints.steps()
        position = checkpoints.read(steps[-1]) if steps else Position()
        again = Regeneration(position, take_over=True)
        limits = self._limits()
        store = Store(self._server.url, name="chaos-harness")
        try:
            left = again.leftovers(store, RUN, list(limits.tasks))
            Run.create(store, RUN, self._nonce, limits, regeneration=again)
        except RolloutMQError as error:
            trial.problems.append(f"not made again: {error}")
            return
        finally:
            store.close()
        trial.made_again = f"step {position.step}, {left.groups} groups, {left.steps} steps after"
        # what was handed out after the checkpoint is gone, and made again
        self.history.note(
            "fault", kind=str(trial), target=trial.key, loses=True, since=since, ended=time.time()
        )
