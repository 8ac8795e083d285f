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

from collections.abc import Mapping, Sequence
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
        self,
        context: RunContext,
        payloads: PayloadStore,
        ledger: BatchLedger,
        nonce: str,
    ) -> None:
        self._store, self._keys, self._limits, _ = context
        self._payloads = payloads
        self._ledger = ledger
        self._nonce = nonce
        self._draws = EndedDraws(context, nonce)
        self._done = Recovery()

    def run(self, position: Position, *, regenerate: bool = False) -> Recovery:
        """Bring the server up to `position`; with `regenerate`, also down to it. Raises Fenced."""
        self._position = position
        self._end_commit()
        steps = self._ledger.steps()
        taken = self._dissolve(steps.freed, steps.taken)
        if regenerate and position.step < steps.freed:
            self._go_below()
        else:
            self._catch_up(taken)
        self._done.changed = self._draws.changed
        self._done.lost = self._draws.lost
        return self._done

    def _end_commit(self) -> None:
        """Archive the rest of a partly archived batch, which cannot be delivered."""
        ledger = self._keys.ledger("train")
        value = self._store.ask("keep", "HGET", ledger, "keep")
        keep = int(value or 0)
        if keep > self._ledger.steps().freed:
            self._ledger.commit(self._nonce, keep, keep)

    # -- batches ---------------------------------------------------------------------------------

    def _dissolve(self, freed: int, taken: int) -> int:
        """Dissolve all batches from the first outside the history of S; return the last left."""
        steps = range(freed + 1, taken + 1)
        below = self._position.step < freed
        first = next((step for step in steps if below or not self._is_history(step)), taken + 1)
        for step in reversed(range(first, taken + 1)):
            self._dissolve_one(step)
        return first - 1

    def _is_history(self, step: int) -> bool:
        """Return whether a batch was trained in its step or, after S, can be trained."""
        found = self._ledger.manifest(step)
        known = self._position.manifest(step)
        if found is None:
            return False
        if known is not None:
            return _payloads(found) == _payloads(known)
        trained = [gid in self._position.trained for gid in found.gids]
        if step > self._position.step:
            return not any(trained)
        # no checkpoint asks for this manifest, so it is not recorded any more; but a group that a
        # later step trained was not in it
        return all(trained) and self._position.kept.isdisjoint(found.gids)

    def _restorable(self, taken: int) -> list[Manifest]:
        """Return the lost batches up to S that are complete, down to the first that is not."""
        found: list[Manifest] = []
        # a ledger has no holes: below the first incomplete batch, none can be delivered
        for step in range(self._position.step, taken, -1):
            manifest = self._position.manifest(step)
            if manifest is None or not self._is_whole(manifest):
                break
            found.insert(0, manifest)
        return found

    def _is_whole(self, manifest: Manifest) -> bool:
        """Return whether records and bytes of all its groups exist; the bytes are then pinned."""
        records = self._store.send(
            "records", [("EXISTS", self._keys.group(gid)) for gid in manifest.gids]
        )
        return all(records) and self._payloads.pin(_payloads(manifest))

    def _restore(self, manifest: Manifest) -> None:
        header, *entries = manifest.lines
        step = manifest.step
        self._call("restore_batch", {"step": step, "header": header}, entries, step=step)
        self._done.restored += 1

    def _dissolve_one(self, step: int) -> None:
        limits = self._limits
        lags = [part for task in limits.training_tasks for part in (task, limits.token_lead(task))]
        self._call("dissolve_batch", {"step": step}, lags, step=step)
        self._done.dissolved += 1

    def _call(
        self,
        script: str,
        args: Mapping[str, Arg],
        tail_args: Sequence[Arg] = (),
        **facts: int,
    ) -> None:
        keys = self._keys.slots(ledger=self._ledger.name, **facts)
        named = {"nonce": self._nonce, **args}
        reply = self._store.call(script, keys, named, tail_args=tail_args, durable=True)
        expect_ok(script, reply)

    # -- up to the checkpoint ----------------------------------------------------------------------

    def _catch_up(self, taken: int) -> None:
        position = self._position
        restorable = self._restorable(taken)
        first = restorable[0].step if restorable else max(taken, position.step) + 1
        has_gap = first > taken + 1
        freed = self._ledger.steps().freed
        living = {gid for step in range(freed + 1, taken + 1) for gid in self._gids(step)}
        living |= {gid for manifest in restorable for gid in manifest.gids}
        if has_gap:
            # neither can those before the gap
            self._ledger.commit(self._nonce, taken, taken)
        self._draws.end(position, living)
        self._revive()
        if has_gap:
            self._done.oldest = first - 1
            self._reset_ledger(first - 1, restorable)
            self._discard(range(taken + 1, first))
        for manifest in restorable:
            self._restore(manifest)

    def _discard(self, steps: range) -> None:
        """Free the bytes of incomplete batches, whose groups are archived."""
        for step in steps:
            if manifest := self._position.manifest(step):
                self._payloads.discard(_payloads(manifest))

    def _gids(self, step: int) -> list[str]:
        manifest = self._ledger.manifest(step)
        return manifest.gids if manifest else []

    # -- down to the checkpoint --------------------------------------------------------------------

    def _go_below(self) -> None:
        """Let everything that was archived after S be drawn again; its bytes are gone."""
        self._ledger.archive.forget(everything=True)
        self._draws.end(self._position, set())
        self._revive()
        self._done.oldest = self._position.step
        self._reset_ledger(self._position.step, [])

    def _revive(self) -> None:
        if not self._draws.has_untrained(self._position):
            return
        # a prompt that is still listed as garbage would be freed after it is written again
        while self._payloads.collect():
            pass
        self._draws.revive(self._position)

    def _reset_ledger(self, step: int, still_to_come: list[Manifest]) -> None:
        position = self._position
        later = [gid for manifest in still_to_come for gid in manifest.gids]
        used = {
            task: position.trained.count(task) - len(numbers_of(task, later))
            for task in self._limits.training_tasks
        }
        pairs = [value for pair in used.items() for value in pair]
        self._call("reset_ledger", {"step": step, "committed": position.step}, pairs)


def _payloads(manifest: Manifest) -> list[PayloadRef]:
    return [entry.payload for entry in manifest.entries]
