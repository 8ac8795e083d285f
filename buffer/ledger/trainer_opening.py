"""How a process becomes the trainer of a run: `take` waits until the server fits its checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from buffer.errors import ConfigError, LedgerError, LostRun
from buffer.ids import POOLS
from buffer.ledger.from_checkpoint import CheckpointRecovery, Recovery
from buffer.ledger.ledger import BatchLedger
from buffer.ledger.position import Position
from buffer.redis.bounds import KEYS_PER_TRIP
from buffer.redis.payloads import PayloadStore
from buffer.redis.scripts import opened, unfenced, unknown_reply
from buffer.redis.store import RunContext

log = logging.getLogger("rolloutmq.opening")

_OTHER_SERVER = "connect to the server of this run, restore its data"
_REGENERATE = (
    "open with regenerate=True and position=, the one in your checkpoint: what was not trained is "
    "then generated again"
)
_REGENERATE_COMMAND = "start with --regenerate: what was not trained is then generated again"


@dataclass(frozen=True, slots=True)
class Opening:
    """The run that a trainer opened, its steps, and what was recovered."""

    run_nonce: str
    taken: int
    committed: int
    freed: int
    recovery: Recovery


class TrainerOpening:
    def __init__(self, context: RunContext, payloads: PayloadStore, ledger: BatchLedger) -> None:
        self._context = context
        self._store, self._keys, self._limits, _ = context
        self._payloads = payloads
        self._ledger = ledger

    def open(
        self,
        nonce: str,
        *,
        lineage: str,
        step: int = 0,
        run_nonce: str = "",
        take_over: bool = False,
        position: Position | None = None,
        regenerate: bool = False,
    ) -> Opening:
        """Become the trainer from a checkpoint of `step` (0: none); `lineage` names its weights.

        `position`, of that checkpoint, replaces `step` and `run_nonce`: a server that lost data is
        corrected, and run and lineage are set in it. `regenerate`, which needs the position, allows
        a server that lost everything, or a checkpoint below what is kept: the missing groups are
        drawn again. Raises RoleHeld if another trainer is alive, LostRun if the server does not
        hold the run of the checkpoint, LedgerError if the checkpoint does not fit its steps.
        """
        keys = self._keys
        if regenerate and position is None:
            position = _start(step, run_nonce)
        if position is not None:
            step = position.step
            run_nonce = position.run_nonce
        reply = self._store.call(
            "trainer_open",
            keys.slots(ledger=self._ledger.name),
            {
                "run_nonce": run_nonce,
                "nonce": nonce,
                "take_over": int(take_over),
                "timeout_ms": self._limits.role_timeout_ms,
                "step": step,
                "lineage": lineage,
                "behind": int(position is not None),
                "regenerate": int(regenerate),
            },
            durable=True,
        )
        run = self._run_nonce(opened(reply, "trainer", keys.run), step)
        recovery = Recovery()
        if position is not None:
            comparison = CheckpointRecovery(self._context, self._payloads, self._ledger, nonce)
            recovery = comparison.run(position, regenerate=regenerate)
        if recovery and not regenerate:
            log.warning(
                "the server had lost data that the checkpoint of step %s records; recovered: %s",
                step,
                recovery,
            )
        self.rescore(nonce, step)
        if position is not None:
            position.run = keys.run
            position.run_nonce = run
            position.lineage = lineage
        return Opening(run, *self._ledger.steps(), recovery)

    def _run_nonce(self, reply: list[Any], step: int) -> str:
        """Return the nonce of the run that was opened. Raises LostRun, LedgerError."""
        match reply:
            case ["OK", run_nonce, *_]:
                return str(run_nonce)
            case ["EMPTY", _]:
                raise LostRun(
                    f"the checkpoint is of step {step}, but on this server no trainer has ever "
                    f"opened run {self._keys.run!r}",
                    hint=f"{_OTHER_SERVER}, or {_REGENERATE}",
                    command_hint=f"{_OTHER_SERVER}, or {_REGENERATE_COMMAND}",
                )
            case ["BELOW", keep]:
                raise LedgerError(
                    f"the checkpoint is of step {step}, but batches up to step {keep} are already "
                    "freed",
                    hint=f"open a newer checkpoint, or {_REGENERATE}",
                    command_hint=f"open a newer checkpoint, or {_REGENERATE_COMMAND}",
                )
            case ["BEHIND", taken]:
                raise LedgerError(
                    f"the checkpoint is of step {step}, but the server only knows steps up to "
                    f"{taken}",
                    hint="the server lost data (see `rolloutmq doctor`); open with position=, the "
                    "one in your checkpoint, which restores what was trained",
                )
        raise unknown_reply("trainer_open", reply)

    def rescore(self, nonce: str, step: int) -> None:
        """Limit the versions of groups from other lineages to the fork `step` (I8)."""
        keys = self._keys
        tasks = self._limits.training_tasks
        # an age index has no lag: the tokens of what waits or runs are not judged one by one
        lags = [self._limits.token_lead(task) for task in tasks for _ in POOLS]
        done = False
        while not done:
            reply = self._store.call(
                "rescore",
                keys.slots(),
                {"nonce": nonce, "step": step, "limit": KEYS_PER_TRIP},
                [*keys.all_pools(tasks), *map(keys.age, tasks)],
                [*lags, *[None] * len(tasks)],
                durable=True,
            )
            done = bool(int(unfenced(reply, "trainer")[2]))


def _start(step: int, run_nonce: str) -> Position:
    """Return the position of a run that has trained nothing. Raises ConfigError for a later one."""
    if step:
        raise ConfigError(
            f"step {step} cannot be opened with regenerate=True alone: what was trained up to it "
            "would be generated and trained again",
            hint="pass position=, the one in the checkpoint of that step",
        )
    return Position(run_nonce=run_nonce)
