"""Batches as records: numbered steps, manifests, and a commit that is tied to a checkpoint (I4 to I8).

The trainer takes step T, trains, writes its checkpoint, then commits. Whatever dies in between, taking T again
returns the same groups in the same order. The position lives in the trainer's checkpoint, as Kafka keeps
offsets with the output; Redis only must not free what a kept checkpoint may ask for again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import orjson

from buffer.control import opened
from buffer.errors import Fenced, LedgerError, ScriptError
from buffer.keys import ENDS, Keys, split_group_id
from buffer.limits import RunLimits
from buffer.manifest import Manifest, ManifestEntry, NotReady
from buffer.order_index import in_order
from buffer.store import Store


@dataclass(frozen=True, slots=True)
class Opening:
    """What the server says to a trainer that opens: its run, and the steps it knows."""

    run_nonce: str
    taken: int
    committed: int
    freed: int


class BatchLedger:
    """The steps of one consumer: `train`, or `eval` for evaluations, which count in no training counter."""

    def __init__(self, store: Store, keys: Keys, limits: RunLimits, name: str = "train") -> None:
        self._store, self._keys, self._limits, self.name = store, keys, limits, name

    def open(self, nonce: str, *, step: int, lineage: str, run_nonce: str = "", take_over: bool = False) -> Opening:
        """Become the trainer, from a checkpoint of `step` (0: none); `lineage` names the weights to come.

        Raises RoleHeld (another one beats), LostRun (not the run the checkpoint knows), LedgerError (the
        checkpoint is older than what is kept, or newer than what the server has).
        """
        keys = self._keys
        reply = self._store.call(
            "trainer_open",
            {
                "meta": keys.meta,
                "control": keys.control,
                "ledger": keys.ledger(self.name),
                "lineages": keys.lineages,
                "events": keys.events,
            },
            {
                "run_nonce": run_nonce,
                "nonce": nonce,
                "take_over": int(take_over),
                "timeout_ms": self._limits.role_timeout_ms,
                "step": step,
                "lineage": lineage,
            },
            durable=True,
        )
        opening = self._opening(opened(reply, "trainer", keys.run), step)
        self._rescore(nonce, step)
        return opening

    def _opening(self, reply: list[str], step: int) -> Opening:
        if reply[0] == "BELOW":
            raise LedgerError(
                f"the checkpoint is of step {step}, but batches up to step {reply[1]} are already freed",
                hint="open a newer checkpoint",
            )
        if reply[0] == "BEHIND":
            raise LedgerError(
                f"the checkpoint is of step {step}, but the server only knows steps up to {reply[1]}",
                hint="the server lost data (see `rolloutmq doctor`); open an older checkpoint",
            )
        return Opening(reply[1], int(reply[2]), int(reply[3]), int(reply[4]))

    def _rescore(self, nonce: str, step: int) -> None:
        """Clamp what dead lineages made after the fork, slice by slice; take waits for the end (I8)."""
        keys, done = self._keys, False
        while not done:
            reply = self._store.call(
                "rescore",
                {"control": keys.control, "groups": keys.groups},
                {"nonce": nonce, "step": step, "limit": 500},
                keys.all_pools(self._limits.training_tasks),
            )
            done = self._unfenced(reply)[2] in (1, "1")

    def take(self, nonce: str, step: int, counts: Mapping[str, int], *, strict: bool = True) -> Manifest | NotReady:
        """The manifest of `step`: the recorded one where it was taken before, else the next groups.

        Best effort (`strict=False`) takes what there is. Nothing stale is ever handed out, whether or not
        `refresh` has run (I8). Raises Fenced; LedgerError for a step that is not the next one.
        """
        tasks = [task for task, count in counts.items() if count > 0]
        reply = self._in_order(nonce, lambda: self._take(nonce, step, tasks, counts, strict))
        return self._taken(reply, step, dict.fromkeys(tasks, (0, 0)))

    def _in_order(self, nonce: str, call: Callable[[], list[str]]) -> list[str]:
        return in_order(self._store, self._keys, self._limits, nonce, call)

    def _take(self, nonce: str, step: int, tasks: list[str], counts: Mapping[str, int], strict: bool) -> list[str]:
        keys, limits, training = self._keys, self._limits, self.name == "train"
        return self._store.call(
            "take_batch",
            {
                "control": keys.control,
                "ledger": keys.ledger(self.name),
                "batch": keys.batch(self.name, step),
                "groups": keys.groups,
                "bell": keys.bell("producer"),
                "events": keys.events,
            },
            {
                "nonce": nonce,
                "step": step,
                "strict": int(strict),
                "threshold": limits.stale_threshold if training else "",
                "policy": limits.order if training else "staleness",
            },
            [k for task in tasks for k in (keys.pool(task, "completed"), keys.order(task), keys.progress(task))],
            [arg for task in tasks for arg in (task, counts[task])],
            durable=True,
        )

    def _taken(self, reply: list[str], step: int, nothing: Mapping[str, tuple[int, int]]) -> Manifest | NotReady:
        match reply[0]:
            case "OK":
                return Manifest.parse(step, reply[1:])
            case "SHORT":
                rows = [reply[i : i + 3] for i in range(1, len(reply), 3)]
                return NotReady({task: (int(ready), int(wanted)) for task, ready, wanted in rows})
            case "EMPTY":
                return NotReady(nothing)
            case "RECOVERING":
                return NotReady({}, recovering=True)
            case "COMMITTED":
                raise LedgerError(f"step {step} is behind the committed step {reply[1]}")
            case "GAP":
                raise LedgerError(f"step {step} cannot be taken: the last taken step is {reply[1]}")
            case "TOO_MANY":
                raise LedgerError(f"a batch holds at most {reply[1]} groups")
        self._unfenced(reply)
        raise ScriptError(f"take_batch: {reply}")

    def quarantine(self, nonce: str, step: int, entry: ManifestEntry, reason: str) -> Manifest:
        """Swap a group that cannot be used for the next ready one of its task; without one the batch gets smaller.

        The batch must be taken and not committed. Returns its new revision, which is what `take` returns from now on;
        the group is a dead letter with `reason`, and counts against its worker. Raises Fenced, LedgerError.
        """
        reply = self._in_order(nonce, lambda: self._quarantine(nonce, step, entry, reason))
        manifest = self._quarantined(reply, step, entry.gid)
        if manifest is None:
            raise LedgerError(f"the manifest of step {step} is gone")
        return manifest

    def _quarantine(self, nonce: str, step: int, entry: ManifestEntry, reason: str) -> list[str]:
        keys, (task, _) = self._keys, split_group_id(entry.gid)
        text = reason[:2000].encode(errors="replace").decode()
        return self._store.call(
            "quarantine",
            {
                "control": keys.control,
                "ledger": keys.ledger(self.name),
                "batch": keys.batch(self.name, step),
                "groups": keys.groups,
                "completed": keys.pool(task, "completed"),
                "progress": keys.progress(task),
                "dead": keys.dead,
                "dead_letters": keys.dead_letters,
                "worker_records": keys.worker_records,
                "bell": keys.bell("producer"),
                "events": keys.events,
                "order": keys.order(task),
            },
            {
                "nonce": nonce,
                "step": step,
                "gid": entry.gid,
                "token": entry.payload.token,
                "reason": orjson.dumps(text).decode(),
            },
            durable=True,
        )

    def _quarantined(self, reply: list[str], step: int, gid: str) -> Manifest | None:
        match reply[0]:
            case "OK":
                return self.manifest(step)
            case "RECOVERING":
                raise LedgerError(f"{gid} stays in step {step}: the run recovers from a fork", hint="open it again")
            case "COMMITTED":
                raise LedgerError(f"{gid} stays in step {step}, which is trained: step {reply[1]} is committed")
            case "NOT_TAKEN":
                raise LedgerError(f"{gid} is not in the batch of step {step}")
        self._unfenced(reply)
        raise ScriptError(f"quarantine: {reply}")

    def commit(self, nonce: str, step: int, keep: int) -> None:
        """The checkpoint of `step` is durable; `keep` is the oldest checkpoint that is kept.

        Batches up to `keep` are archived, and freed once they are not retained; newer ones can be delivered again.
        """
        keys, freed = self._keys, keep - 1
        tasks = list(self._limits.tasks)
        while freed < keep:
            reply = self._store.call(
                "commit",
                {
                    "control": keys.control,
                    "ledger": keys.ledger(self.name),
                    "batches": keys.batches(self.name),
                    "groups": keys.groups,
                    "garbage": keys.garbage,
                    "events": keys.events,
                },
                {"nonce": nonce, "step": step, "keep": keep, "limit": 500},
                [key for task in tasks for key in (keys.progress(task), keys.ended(task, ENDS[0]))],
                tasks,
                durable=True,
            )
            self._unfenced(reply)
            if reply[0] != "OK":
                raise LedgerError(f"step {step} cannot be committed: {' '.join(str(r) for r in reply)}")
            freed = min(int(reply[2]), keep) if int(reply[1]) >= keep else keep
        self.forget()

    def forget(self, *, exported: int = 0) -> int:
        """Free archived batches that are retained no longer; returns the newest step of which nothing is left.

        `exported`: batches up to this step were copied elsewhere, which frees them under `retain_until_exported`. Any
        process may call it, as often as it likes. Evaluations are not retained.
        """
        keys, limits, training = self._keys, self._limits, self.name == "train"
        while True:
            reply = self._store.call(
                "forget",
                {
                    "ledger": keys.ledger(self.name),
                    "batches": keys.batches(self.name),
                    "garbage": keys.garbage,
                    "events": keys.events,
                },
                {
                    "retain": limits.retain_batches if training else 0,
                    "wait": int(limits.retain_until_exported and training),
                    "exported": exported,
                    "limit": 1000,
                },
            )
            if int(reply[2]) == 0:
                return int(reply[1])

    def archived(self) -> range:
        """The steps whose archived batches are still there: read them with `manifest` and `ReplayBuffer.get`."""
        ledger = self._keys.ledger(self.name)
        values = self._store.retrying("archived", lambda: self._store.control.hmget(ledger, "forgotten", "freed"))
        forgotten, freed = (int(v or 0) for v in values)
        return range(forgotten + 1, freed + 1)

    def steps(self) -> tuple[int, int, int]:
        """(taken, committed, freed)."""
        names = ("taken", "committed", "freed")
        ledger = self._keys.ledger(self.name)
        values = self._store.retrying("steps", lambda: self._store.control.hmget(ledger, *names))
        taken, committed, freed = (int(v or 0) for v in values)
        return taken, committed, freed

    def manifest(self, step: int) -> Manifest | None:
        """The recorded manifest of a step that was taken and not freed yet; of an archived one while it is retained."""
        key = self._keys.batch(self.name, step)
        raw = self._store.retrying("manifest", lambda: self._store.control.lrange(key, 0, -1))
        lines = [line.decode() for line in raw]
        return Manifest.parse(step, lines) if lines else None

    def set_target(self, nonce: str, task: str, target: int) -> None:
        """Ask for groups of a task whose target the trainer sets (an evaluation), `target` in all so far."""
        keys = self._keys
        reply = self._store.call(
            "set_target",
            {"control": keys.control, "progress": keys.progress(task), "bell": keys.bell("producer")},
            {"nonce": nonce, "target": target},
        )
        self._unfenced(reply)

    def _unfenced(self, reply: list[str]) -> list[str]:
        if reply[0] == "FENCED":
            raise Fenced("this is no longer the trainer of the run: another one was opened")
        return reply
