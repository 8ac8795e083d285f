"""Batches as records: numbered steps, manifests, and a commit that is tied to a checkpoint (I4 to
I8).

The trainer takes step T, trains, writes its checkpoint, then commits. Whatever dies in between,
taking T again returns the same groups in the same order. The position lives in the trainer's
checkpoint, as Kafka keeps offsets with the output; Redis only must not free what a kept checkpoint
may ask for again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import orjson

from buffer.batches.archive import Archive
from buffer.errors import LedgerError, ScriptError
from buffer.groups.order_index import in_order
from buffer.model.ids import split_group_id
from buffer.model.limits import RunLimits
from buffer.model.manifest import Manifest, ManifestEntry, NotReady
from buffer.store.keys import Keys
from buffer.store.replies import unfenced
from buffer.store.store import Store

BAD_GROUPS = 8
BAD_WINDOW_MS = 600_000
"""So many groups that no trainer can use, within that time, and their worker claims nothing more
(I11).
"""


class BatchLedger:
    """The steps of one consumer: `train`, or `eval` for evaluations, which count in no training
    counter.
    """

    def __init__(self, store: Store, keys: Keys, limits: RunLimits, name: str = "train") -> None:
        self._store = store
        self._keys = keys
        self._limits = limits
        self.name = name
        self.archive = Archive(store, keys, limits, name)

    def take(
        self, nonce: str, step: int, counts: Mapping[str, int], *, strict: bool = True
    ) -> Manifest | NotReady:
        """The manifest of `step`: the recorded one where it was taken before, else the next groups.

        Best effort (`strict=False`) takes what there is. Nothing stale is ever handed out, whether
        or not `refresh` has run (I8). Raises Fenced; LedgerError for a step that is not the next
        one.
        """
        tasks = [task for task, count in counts.items() if count > 0]
        reply = self._in_order(nonce, lambda: self._take(nonce, step, tasks, counts, strict))
        return self._taken(reply, step, dict.fromkeys(tasks, (0, 0)))

    def _in_order(self, nonce: str, call: Callable[[], list[str]]) -> list[str]:
        return in_order(self._store, self._keys, self._limits, nonce, call)

    def _take(
        self, nonce: str, step: int, tasks: list[str], counts: Mapping[str, int], strict: bool
    ) -> list[str]:
        keys = self._keys
        limits = self._limits
        training = self.name == "train"
        return self._store.call(
            "take_batch",
            keys.slots(ledger=self.name, step=step),
            {
                "nonce": nonce,
                "step": step,
                "strict": int(strict),
                "threshold": limits.stale_threshold if training else "",
                "policy": limits.order if training else "staleness",
                "tokens": limits.token_threshold
                if training and limits.token_threshold is not None
                else "",
                "low": limits.low_bytes,
                "high": limits.high_bytes,
            },
            [keys.slots(task=task) for task in tasks],
            [arg for task in tasks for arg in (task, counts[task])],
            durable=True,
        )

    def _taken(
        self, reply: list[str], step: int, nothing: Mapping[str, tuple[int, int]]
    ) -> Manifest | NotReady:
        match reply[0]:
            case "OK":
                return Manifest.parse(step, reply[1:])
            case "SHORT" | "CHECKPOINT_NOW":
                rows = [reply[i : i + 3] for i in range(1, len(reply), 3)]
                missing = {task: (int(ready), int(wanted)) for task, ready, wanted in rows}
                return NotReady(missing, checkpoint_now=reply[0] == "CHECKPOINT_NOW")
            case "EMPTY":
                return NotReady(nothing)
            case "RECOVERING":
                return NotReady({}, recovering=True)
            case "COMMITTED":
                raise LedgerError(f"step {step} is behind the committed step {reply[1]}")
            case "GAP":
                raise LedgerError(
                    f"step {step} cannot be taken: the last taken step is {reply[1]}",
                    hint="if that step was taken, the server lost data: open again, from the newest checkpoint",
                )
            case "TOO_MANY":
                raise LedgerError(f"a batch holds at most {reply[1]} groups")
        unfenced(reply, "trainer")
        raise ScriptError(f"take_batch: {reply}")

    def quarantine(
        self,
        nonce: str,
        step: int,
        entry: ManifestEntry,
        reason: str,
        *,
        is_workers_fault: bool = True,
    ) -> Manifest:
        """Swap a group that cannot be used for the next ready one of its task; without one its
        place stays open.

        The batch must be taken and not committed. Returns its new revision, which is what `take`
        returns from now on; the group is a dead letter with `reason`. If it `is_workers_fault`, it
        counts against its worker, which is barred after BAD_GROUPS of them within BAD_WINDOW_MS.
        Raises Fenced, LedgerError.
        """
        reply = self._in_order(
            nonce, lambda: self._quarantine(nonce, step, entry, reason, is_workers_fault)
        )
        manifest = self._quarantined(reply, step, entry.gid)
        if manifest is None:
            raise LedgerError(f"the manifest of step {step} is gone")
        return manifest

    def _quarantine(
        self, nonce: str, step: int, entry: ManifestEntry, reason: str, is_workers_fault: bool
    ) -> list[str]:
        task, _ = split_group_id(entry.gid)
        text = reason[:2000].encode(errors="replace").decode()
        return self._store.call(
            "quarantine",
            self._keys.slots(ledger=self.name, step=step, task=task),
            {
                "nonce": nonce,
                "step": step,
                "gid": entry.gid,
                "token": entry.payload.token,
                "reason": orjson.dumps(text).decode(),
                "most": BAD_GROUPS if is_workers_fault else 0,
                "window_ms": BAD_WINDOW_MS,
            },
            durable=True,
        )

    def _quarantined(self, reply: list[str], step: int, what: str) -> Manifest | None:
        """The manifest after `quarantine` of a group, or `refill` for a task."""
        match reply[0]:
            case "OK":
                return self.manifest(step)
            case "RECOVERING":
                raise LedgerError(
                    f"{what} stays in step {step}: the run recovers from a fork",
                    hint="open it again",
                )
            case "COMMITTED":
                raise LedgerError(
                    f"{what} stays in step {step}, which is trained: step {reply[1]} is committed"
                )
            case "NOT_TAKEN":
                raise LedgerError(f"{what} is not in the batch of step {step}")
        unfenced(reply, "trainer")
        raise ScriptError(f"{what} of step {step}: {reply}")

    def refill(self, nonce: str, step: int) -> Manifest | NotReady:
        """Fill the places that quarantine left open in a batch with what is ready; NotReady while
        some still are.

        What is filled is the record from now on. Raises Fenced, LedgerError.
        """
        manifest = self.manifest(step)
        still: dict[str, tuple[int, int]] = {}
        for task in manifest.open_places if manifest else ():
            reply = self._in_order(nonce, lambda task=task: self._refill(nonce, step, task))  # type: ignore[misc]
            manifest = self._quarantined(reply, step, task)
            if int(reply[2]):
                still[task] = (0, int(reply[2]))
        if manifest is None:
            raise LedgerError(f"the manifest of step {step} is gone")
        return NotReady(still) if still else manifest

    def _refill(self, nonce: str, step: int, task: str) -> list[str]:
        return self._store.call(
            "refill",
            self._keys.slots(ledger=self.name, step=step, task=task),
            {"nonce": nonce, "step": step, "task": task},
            durable=True,
        )

    def commit(self, nonce: str, step: int, keep: int) -> None:
        """The checkpoint of `step` is durable; `keep` is the oldest checkpoint that is kept.

        Batches up to `keep` are archived, and freed once they are not retained; newer ones can be
        delivered again.
        """
        keys = self._keys
        freed = keep - 1
        tasks = list(self._limits.tasks)
        while freed < keep:
            reply = self._store.call(
                "commit",
                keys.slots(ledger=self.name),
                {"nonce": nonce, "step": step, "keep": keep, "limit": 500},
                [keys.slots(task=task) for task in tasks],
                tasks,
                durable=True,
            )
            unfenced(reply, "trainer")
            if reply[0] != "OK":
                raise LedgerError(
                    f"step {step} cannot be committed: {' '.join(str(r) for r in reply)}",
                    hint="after a GAP, the server lost data: open again, from the newest checkpoint",
                )
            freed = min(int(reply[2]), keep) if int(reply[1]) >= keep else keep
        self.archive.forget()

    def steps(self) -> tuple[int, int, int]:
        """(taken, committed, freed)."""
        names = ("taken", "committed", "freed")
        ledger = self._keys.ledger(self.name)
        values = self._store.retrying("steps", lambda: self._store.control.hmget(ledger, *names))
        taken, committed, freed = (int(v or 0) for v in values)
        return taken, committed, freed

    def manifest(self, step: int) -> Manifest | None:
        """The recorded manifest of a step that was taken and not freed yet; of an archived one
        while it is retained.
        """
        return self.archive.manifest(step)

    def set_target(self, nonce: str, task: str, target: int) -> None:
        """Ask for groups of a task whose target the trainer sets (an evaluation), `target` in all
        so far.
        """
        reply = self._store.call(
            "set_target", self._keys.slots(task=task), {"nonce": nonce, "target": target}
        )
        unfenced(reply, "trainer")
