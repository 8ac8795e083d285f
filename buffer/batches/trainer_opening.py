"""How a trainer becomes the one of a run: it says what its checkpoint knows, and take waits until
the server agrees.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from buffer.batches.ledger import BatchLedger
from buffer.batches.position import Position
from buffer.batches.reassertion import Reassertion, Recovery
from buffer.errors import LedgerError, LostRun
from buffer.model.limits import RunLimits
from buffer.store.keys import Keys
from buffer.store.payloads import PayloadStore
from buffer.store.replies import opened, unfenced
from buffer.store.store import Store

log = logging.getLogger("rolloutmq.opening")


@dataclass(frozen=True, slots=True)
class Opening:
    """What the server says to a trainer that opens: its run, and the steps it knows. `recovery`:
    what was put right.
    """

    run_nonce: str
    taken: int
    committed: int
    freed: int
    recovery: Recovery


class TrainerOpening:
    """Opens the `train` ledger of a run."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        limits: RunLimits,
        payloads: PayloadStore,
        ledger: BatchLedger,
    ) -> None:
        self._store = store
        self._keys = keys
        self._limits = limits
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
        """Become the trainer, from a checkpoint of `step` (0: none); `lineage` names the weights to
        come.

        The `position` of a checkpoint says that better, and a server that lost what it knows is
        told again; it is then of this run and lineage. `regenerate` is for a server that lost
        everything, or a checkpoint below what is kept: what is gone is drawn again. Raises RoleHeld
        (another one beats), LostRun (not the run the checkpoint knows), LedgerError (the checkpoint
        is older than what is kept, or newer than what the server has).
        """
        keys = self._keys
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
                "regenerate": int(regenerate and position is not None),
            },
            durable=True,
        )
        run = self._accepted(opened(reply, "trainer", keys.run), step)
        recovery = self._reassert(nonce, position, regenerate) if position else Recovery()
        self.rescore(nonce, step)
        if position is not None:
            position.run = keys.run
            position.run_nonce = run
            position.lineage = lineage
        return Opening(run, *self._ledger.steps(), recovery)

    def _accepted(self, reply: list[str], step: int) -> str:
        match reply[0]:
            case "EMPTY":
                raise LostRun(
                    f"the checkpoint is of step {step}, but here no trainer has ever opened run {self._keys.run!r}",
                    hint="connect to the server of this run, restore its data, or open with --regenerate: "
                    "what was not trained yet is then generated again",
                )
            case "BELOW":
                raise LedgerError(
                    f"the checkpoint is of step {step}, but batches up to step {reply[1]} are already freed",
                    hint="open a newer checkpoint, or this one with --regenerate: what came after is generated again",
                )
            case "BEHIND":
                raise LedgerError(
                    f"the checkpoint is of step {step}, but the server only knows steps up to {reply[1]}",
                    hint="the server lost data (see `rolloutmq doctor`); open with the position that your checkpoint "
                    "holds, and it is told again what was trained",
                )
        return reply[1]

    def _reassert(self, nonce: str, position: Position, regenerate: bool) -> Recovery:
        parts = (self._store, self._keys, self._limits, self._payloads, self._ledger, nonce)
        recovery = Reassertion(*parts).run(position, regenerate=regenerate)
        if recovery:
            log.warning(
                "the server had lost what the checkpoint of step %s knows: %s",
                position.step,
                recovery,
            )
        return recovery

    def rescore(self, nonce: str, step: int) -> None:
        """Clamp what dead lineages made after the fork, slice by slice; take waits for the end
        (I8).
        """
        keys = self._keys
        done = False
        while not done:
            reply = self._store.call(
                "rescore",
                keys.slots(),
                {"nonce": nonce, "step": step, "limit": 500, "lag": self._limits.lag},
                keys.all_pools(self._limits.training_tasks),
                durable=True,
            )
            done = unfenced(reply, "trainer")[2] in (1, "1")
