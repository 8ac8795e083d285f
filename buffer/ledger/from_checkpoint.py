"""Recovery after a server lost data: restore what the trainer's checkpoint records (I6).

A server can lose its last second (`appendfsync everysec`), be reset to an older state, or come back
empty. Every opening compares it with a checkpoint of step S. If something is lost, while `take`
waits:

1. a batch that does not belong to the history of S is dissolved: its groups are ready again
2. batches after the oldest kept checkpoint are restored if their bytes exist; if not, they and all
   before them are lost, and S is the oldest checkpoint that opens without `regenerate`
3. every other trained draw is archived from its stage; one that only a trainer before a
   `regenerate` had trained, and that the server lost as well, is drawn again
4. the ledger continues after S

Each is one script, or slices of one, that may be repeated. A trainer that dies between two of them
leaves `recovering` set, so that no batch is delivered, and the next trainer compares again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from buffer.job import PayloadRef
from buffer.ledger.ended_draws import EndedDraws, expect_ok, numbers_of
from buffer.ledger.ledger import BatchLedger
from buffer.ledger.position import Position
from buffer.manifest import Manifest
from buffer.redis.payloads import PayloadStore
from buffer.redis.scripts import Arg
from buffer.redis.store import RunContext


@dataclass(slots=True)
class Recovery:
    """The corrections of one opening: draws by number, and batches."""

    changed: int = 0
    lost: int = 0
    restored: int = 0
    dissolved: int = 0
    oldest: int | None = None  # oldest step that opens without `regenerate`, if bytes are gone

    def __bool__(self) -> bool:
        return bool(self.changed or self.lost or self.restored or self.dissolved or self.oldest)


class CheckpointRecovery:
    """Compare and correct a server for the trainer `nonce`, whose opening set `recovering`."""

    def __init__(
        self, context: RunContext, payloads: PayloadStore, ledger: BatchLedger, nonce: str
    ) -> None:
        self._store, self._keys, self._limits, _ = context
        self._payloads = payloads
        self._ledger = ledger
        self._nonce = nonce
        self._draws = EndedDraws(context, nonce)
        self._done = Recovery()

    def run(self, position: Position, *, regenerate: bool = False) -> Recovery:
        """Bring the server up to `position`; with `regenerate`, also down to it. Raises Fenced."""
        ledger = self._ledger
        # the rest of a partly archived batch cannot be delivered
        keep = int(self._store.ask("keep", "HGET", self._keys.ledger("train"), "keep") or 0)
        if keep > ledger.steps().freed:
            ledger.commit(self._nonce, keep, keep)
        steps = ledger.steps()
        taken = self._dissolve(position, steps.freed, steps.taken)
        if regenerate and position.step < steps.freed:
            # what was archived after S is drawn again: its bytes are gone
            ledger.archive.forget(everything=True)
            self._end_draws(position, set())
            self._reset_ledger(position, position.step, [])
        else:
            self._catch_up(position, steps.freed, taken)
        self._done.changed = self._draws.changed
        self._done.lost = self._draws.lost
        return self._done

    def _dissolve(self, position: Position, freed: int, taken: int) -> int:
        """Dissolve all batches from the first outside the history of S; return the last left."""
        limits = self._limits
        first = freed + 1
        if position.step >= freed:
            while first <= taken and self._is_history(position, first):
                first += 1
        lags = [part for task in limits.training_tasks for part in (task, limits.token_lead(task))]
        for step in reversed(range(first, taken + 1)):
            self._call("dissolve_batch", {"step": step}, lags, step=step)
            self._done.dissolved += 1
        return first - 1

    def _is_history(self, position: Position, step: int) -> bool:
        """Return whether a batch was trained in its step or, after S, can be trained."""
        found = self._ledger.manifest(step)
        known = position.manifest(step)
        if found is None:
            return False
        if known is not None:
            return _payloads(found) == _payloads(known)
        trained = [gid in position.trained for gid in found.gids]
        if step > position.step:
            return not any(trained)
        # no checkpoint asks for this manifest, so it is not recorded any more; but a group that a
        # later step trained was not in it
        return all(trained) and position.kept.isdisjoint(found.gids)

    def _catch_up(self, position: Position, freed: int, taken: int) -> None:
        restorable = self._restorable(position, taken)
        first = restorable[0].step if restorable else max(taken, position.step) + 1
        has_gap = first > taken + 1
        left = [self._ledger.manifest(step) for step in range(freed + 1, taken + 1)]
        living = {gid for manifest in (*left, *restorable) if manifest for gid in manifest.gids}
        if has_gap:
            # neither can those before the gap be delivered
            self._ledger.commit(self._nonce, taken, taken)
        self._end_draws(position, living)
        if has_gap:
            self._reset_ledger(position, first - 1, restorable)
            # the groups of incomplete batches are archived now
            for manifest in map(position.manifest, range(taken + 1, first)):
                if manifest:
                    self._payloads.discard(_payloads(manifest))
        for manifest in restorable:
            header, *entries = manifest.lines
            step = manifest.step
            self._call("restore_batch", {"step": step, "header": header}, entries, step=step)
            self._done.restored += 1

    def _restorable(self, position: Position, taken: int) -> list[Manifest]:
        """Return the lost batches up to S that are complete, down to the first that is not.

        The bytes of their groups are pinned then.
        """
        found: list[Manifest] = []
        # a ledger has no holes: below the first incomplete batch, none can be delivered
        for step in range(position.step, taken, -1):
            manifest = position.manifest(step)
            if manifest is None:
                break
            reads = [("EXISTS", self._keys.group(gid)) for gid in manifest.gids]
            records = self._store.send("records", reads)
            if not all(records) or not self._payloads.pin(_payloads(manifest)):
                break
            found.insert(0, manifest)
        return found

    def _end_draws(self, position: Position, living: Collection[str]) -> None:
        self._draws.end(position, living)
        if self._draws.has_untrained(position):
            # a prompt that is still listed as garbage would be freed after it is written again
            while self._payloads.collect():
                pass
            self._draws.revive(position)

    def _reset_ledger(
        self, position: Position, step: int, still_to_come: Sequence[Manifest]
    ) -> None:
        self._done.oldest = step
        later = [gid for manifest in still_to_come for gid in manifest.gids]
        used: list[Arg] = []
        for task in self._limits.training_tasks:
            used += [task, position.trained.count(task) - len(numbers_of(task, later))]
        self._call("reset_ledger", {"step": step, "committed": position.step}, used)

    def _call(
        self, script: str, args: Mapping[str, Arg], tail_args: Sequence[Arg] = (), **facts: int
    ) -> None:
        keys = self._keys.slots(ledger=self._ledger.name, **facts)
        named = {"nonce": self._nonce, **args}
        reply = self._store.call(script, keys, named, tail_args=tail_args, durable=True)
        expect_ok(script, reply)


def _payloads(manifest: Manifest) -> list[PayloadRef]:
    return [entry.payload for entry in manifest.entries]
