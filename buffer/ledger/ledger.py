"""Batches as records: numbered steps, manifests, and commits tied to checkpoints (I4 to I8).

The trainer takes step T, trains, writes its checkpoint, then commits. If a process dies in between,
taking T again returns the same groups in order. The checkpoint stores the position, as Kafka stores
offsets with the output; Redis keeps what a kept checkpoint may ask for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from buffer.errors import ConfigError, LedgerError, RunDamaged
from buffer.ids import split_group_id
from buffer.ledger.archive import ArchivedBatches, Forgotten, parse_manifest
from buffer.manifest import Manifest, ManifestEntry, NotReady
from buffer.redis.bounds import KEYS_PER_TRIP
from buffer.redis.key_fields import HINT, read_counts
from buffer.redis.keys import SlotKeys
from buffer.redis.scripts import Arg, ScriptCall, unfenced, unknown_reply
from buffer.redis.store import RunContext

BAD_GROUPS = 8
"""Unusable groups of one worker within `BAD_WINDOW_MS` that bar it from claiming (I11)."""

BAD_WINDOW_MS = 600_000

_GAP = (
    "if a later step was taken, the server lost data: see `rolloutmq fsck`, or open the trainer "
    "again from the newest checkpoint"
)


class LedgerSteps(NamedTuple):
    """The newest steps that were taken, committed, and archived."""

    taken: int
    committed: int
    freed: int


class BatchLedger:
    """The steps of one consumer: `train`, or `eval`, which moves no training counter."""

    def __init__(self, context: RunContext, name: str = "train") -> None:
        self._context = context
        self._store, self._keys, self._limits, _ = context
        self._observers = context.observers if name == "train" else ()
        self.name = name
        self.archive = ArchivedBatches(context, name)

    # -- take ----------------------------------------------------------------------------------

    def take(
        self, nonce: str, step: int, counts: Mapping[str, int], *, strict: bool = True
    ) -> Manifest | NotReady:
        """Return the manifest of `step`: the recorded one, or else one of the next ready groups.

        Without `strict`, the batch contains what is ready. If no group is asked for, the manifest
        is empty and nothing is recorded. Never returns a stale group (I8). Raises Fenced;
        LedgerError for a step that is not the next; ConfigError for an unknown task.
        """
        began_ns = time.time_ns()
        training = self.name == "train"
        limits = self._limits
        _check_counts(counts, limits.training_tasks if training else list(limits.tasks))
        tasks = [task for task, count in counts.items() if count > 0]
        expires = limits.token_threshold if training else None
        rows = [
            (task, counts[task], limits.threshold(task), int(limits.waits_for_stragglers(task)))
            for task in tasks
        ]
        args: dict[str, Arg] = {
            "nonce": nonce,
            "step": step,
            "strict": int(strict),
            "order": limits.order if training else "staleness",
            "tokens": expires,
            "low": limits.low_bytes,
            "high": limits.high_bytes,
        }
        reply = self._call(
            "take_batch",
            self._keys.slots(ledger=self.name, step=step),
            args,
            [self._keys.slots(task=task) for task in tasks],
            [arg for row in rows for arg in row],
        )
        answer = self._taken(reply, step, tasks)
        if isinstance(answer, Manifest):
            for observer in self._observers:
                observer.taken(answer, began_ns)
        return answer

    def _taken(self, reply: list[Any], step: int, tasks: Sequence[str]) -> Manifest | NotReady:
        match reply:
            case ["OK", *lines]:
                return parse_manifest(self._keys.batch(self.name, step), step, lines)
            case ["SHORT" | "CHECKPOINT_NOW" | "STRAGGLERS" as why, *rows]:
                facts = zip(rows[::3], rows[1::3], rows[2::3], strict=True)
                return NotReady(
                    {task: (int(ready), int(wanted)) for task, ready, wanted in facts},
                    checkpoint_now=why == "CHECKPOINT_NOW",
                    awaits_stragglers=why == "STRAGGLERS",
                )
            case ["EMPTY"]:
                return NotReady(dict.fromkeys(tasks, (0, 0))) if tasks else Manifest(step, "", ())
            case ["RECOVERING"]:
                return NotReady({}, recovering=True)
            case ["COMMITTED", committed]:
                raise LedgerError(f"step {step} is behind the committed step {committed}")
            case ["GAP", taken]:
                raise LedgerError(
                    f"step {step} cannot be taken: {self._keys.ledger(self.name)} says that the "
                    f"last taken step is {taken}",
                    hint=_GAP,
                )
            case ["TOO_MANY", limit]:
                raise LedgerError(f"a batch contains at most {limit} groups")
        unfenced(reply, "trainer")
        raise unknown_reply("take_batch", reply)

    def _call(
        self,
        script: str,
        keys: SlotKeys,
        args: Mapping[str, Arg],
        tail_keys: Sequence[SlotKeys] = (),
        tail_args: Sequence[Arg] = (),
    ) -> list[Any]:
        """Call a script that takes groups. Raises RunDamaged if the record of a group is gone."""
        reply = self._store.call(script, keys, args, tail_keys, tail_args, durable=True)
        if reply[0] == "DAMAGED":
            raise RunDamaged(
                f"{reply[1]} is gone, and its group is in a pool: {script} did nothing", hint=HINT
            )
        return reply

    # -- quarantine ------------------------------------------------------------------------------

    def quarantine(
        self,
        nonce: str,
        step: int,
        entry: ManifestEntry,
        reason: str,
        *,
        is_workers_fault: bool = True,
    ) -> Manifest:
        """Replace an unusable group by the next ready one of its task, or leave its slot empty.

        The group becomes a dead letter with `reason`, and counts against its worker if it
        `is_workers_fault`. Returns the new revision of the batch, which must be taken and not
        committed. Raises Fenced, LedgerError.
        """
        task, _ = split_group_id(entry.gid)
        # messages may contain lone surrogates, which JSON cannot contain
        text = reason[:2000].encode(errors="replace").decode()
        reply = self._call(
            "quarantine",
            self._keys.slots(ledger=self.name, step=step, task=task),
            {
                "nonce": nonce,
                "step": step,
                "gid": entry.gid,
                "token": entry.payload.token,
                "reason": orjson.dumps(text).decode(),
                "max_bad": BAD_GROUPS if is_workers_fault else 0,
                "window_ms": BAD_WINDOW_MS,
            },
        )
        _accepted(reply, step, entry.gid)
        return self.recorded(step)

    def refill(self, nonce: str, step: int) -> Manifest | NotReady:
        """Fill the slots that quarantine left empty with ready groups; return the new manifest.

        Returns NotReady while some are still empty. Raises Fenced, LedgerError.
        """
        still_empty: dict[str, tuple[int, int]] = {}
        for task in self.recorded(step).open_places:
            reply = self._call(
                "refill",
                self._keys.slots(ledger=self.name, step=step, task=task),
                {"nonce": nonce, "step": step, "task": task},
            )
            _filled, empty = _accepted(reply, step, task)
            if int(empty):
                still_empty[task] = (0, int(empty))
        return NotReady(still_empty) if still_empty else self.recorded(step)

    # -- commit ----------------------------------------------------------------------------------

    def commit(self, nonce: str, step: int, keep: int) -> None:
        """Record that the checkpoint of `step` is durable and that `keep` is the oldest kept one.

        Archives batches up to `keep`; newer ones can be delivered again. Raises Fenced,
        LedgerError.
        """
        began_ns = time.time_ns()
        tasks = list(self._limits.tasks)
        commit = ScriptCall(
            "commit",
            self._keys.slots(ledger=self.name),
            {"nonce": nonce, "step": step, "keep": keep, "limit": KEYS_PER_TRIP},
            [self._keys.slots(task=task) for task in tasks],
            tasks,
        )
        is_done = False
        while not is_done:
            # each archives or frees a bounded number of groups
            reply, forgot = self._store.send(
                "commit", [commit, self.archive.forgetting()], durable=True
            )
            match unfenced(reply, "trainer"):
                case ["OK", committed, freed]:
                    # nothing behind the committed step is archived, even if `keep` is beyond it
                    is_done = int(committed) < keep or int(freed) >= keep
                    is_done = is_done and not Forgotten.parse(forgot).left
                case _:
                    raise LedgerError(
                        f"step {step} of {self._keys.ledger(self.name)} cannot be committed: "
                        f"{' '.join(map(str, reply))}",
                        hint=_GAP,
                    )
        for observer in self._observers:
            observer.committed(step, began_ns)

    # -- records -----------------------------------------------------------------------------------

    def steps(self) -> LedgerSteps:
        ledger = self._keys.ledger(self.name)
        values = self._store.ask("steps", "HMGET", ledger, *LedgerSteps._fields)
        return LedgerSteps(*read_counts(ledger, LedgerSteps._fields, values))

    def manifest(self, step: int) -> Manifest | None:
        """Return the recorded manifest of a step, or None if it was not taken or was freed."""
        return self.archive.manifest(step)

    def recorded(self, step: int) -> Manifest:
        """Return the recorded manifest of a step. Raises LedgerError if it is gone."""
        manifest = self.manifest(step)
        if manifest is None:
            raise LedgerError(f"the manifest of step {step} is gone")
        return manifest

    def set_target(self, nonce: str, task: str, begins: int, target: int) -> None:
        """Request the draws `begins` to `target` - 1 of an evaluation task, each once.

        Earlier draws are requested with them, if they were not. Raises Fenced.
        """
        reply = self._store.call(
            "set_target",
            self._keys.slots(task=task),
            {"nonce": nonce, "begins": begins, "target": target},
        )
        unfenced(reply, "trainer")


def _check_counts(counts: Mapping[str, int], known: Sequence[str]) -> None:
    for task, count in counts.items():
        if task not in known:
            raise ConfigError(
                f"no groups of task {task[:80]!r} can be taken",
                hint=f"the tasks of this ledger are {', '.join(known)}",
            )
        if count < 0:
            raise ConfigError(
                f"{count} groups of task {task} cannot be taken", hint="take 0 or more"
            )


def _accepted(reply: list[Any], step: int, what: str) -> list[Any]:
    """Return the fields of an OK reply to `quarantine` or `refill`. Raises Fenced, LedgerError."""
    match unfenced(reply, "trainer"):
        case ["OK", *fields]:
            return fields
        case ["RECOVERING"]:
            raise LedgerError(
                f"{what} stays in step {step}: the run is recovering from a fork",
                hint="open the trainer again",
            )
        case ["COMMITTED", committed]:
            raise LedgerError(
                f"{what} stays in step {step}, which is trained: step {committed} is committed"
            )
        case ["NOT_TAKEN"]:
            raise LedgerError(f"{what} is not in the batch of step {step}")
    raise unknown_reply(f"{what} of step {step}", reply)
