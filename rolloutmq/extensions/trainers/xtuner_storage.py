"""XTuner's storage of groups, in a run.

A file in each checkpoint of XTuner's says which groups the weights have seen. A group that XTuner
takes stays in the run until two checkpoints say so, since the last one may be incomplete.

What XTuner's and our rollouts both have is in the same columns, so that `rolloutmq show`, queries
and exports read it: texts, token ids, logprobs, masks, versions, score. All else is in `extra`.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import ray
from numpy.typing import NDArray
from xtuner.v1.data_proto.rl_data import RolloutState as XTunerState
from xtuner.v1.data_proto.rl_data import Status as XTunerStatus
from xtuner.v1.rl import replay_buffer as theirs

from buffer.errors import RunExists, RunNotFound
from buffer.groups.record_walk import RecordWalk, payload_of
from buffer.ids import IMPORTED_FROM, new_nonce, split_group_id
from buffer.ledger.ended_draws import EndedDraws
from buffer.ledger.position import Position
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.redis.whole_file import replace_file
from buffer.run.run import Run
from buffer.wire.rollout import OF_RESPONSE, RolloutState, Status, VersionSpan
from consumer.handle.rollout_consumer import RolloutConsumer
from rolloutmq.extensions.trainers import plain_values
from rolloutmq.extensions.trainers.plain_values import Kinds, apart, models_of, together

OURS = {
    "message": "messages",
    "prompt_ids": "prompt_ids",
    "response": "response",
    "response_ids": "response_ids",
    "response_model_steps": "spans",
    "logprobs": "logprobs",
    "response_mask": "response_mask",
    "finish_reason": "finish_reason",
}
"""Fields of XTuner's, each with the one of ours that replaces it where both hold the same."""

LONGEST = 2**17
"""Prompts with more tokens or characters, as with images in the text, are in `extra` alone."""


def taken_apart(group: list[XTunerState], record: dict[str, Any]) -> list[RolloutState]:
    """Return the rollouts of a group; `record` is kept with the first. Raises WireError."""
    prompt = group[0].prompt_ids
    if any(state.prompt_ids != prompt for state in group) or len(prompt or ()) > LONGEST:
        prompt = None  # a group of ours has one prompt
    arrays: dict[bytes, NDArray[Any]] = {}
    kinds = _kinds(lambda array: _number(arrays, array))
    status = Status.COMPLETED if record["status"] == "completed" else Status.ABORTED
    states, rest = [], []
    for n, state in enumerate(group):
        ours = _ours(state, prompt)
        ours.index, ours.status = n, status
        fields = {name: value for name, value in state if value is not None}
        same = [name for name in OURS if fields.get(name) and _theirs(ours, name) == fields[name]]
        for name in same:
            del fields[name]
        rest.append((same, apart(fields, kinds)))
        states.append(ours)
    kept = plain_values.encode((rest, list(arrays.values())), "RolloutState")
    states[0].extra = {OF_RESPONSE: {"record": record, "rollouts": kept}}
    return states


def _number(arrays: dict[bytes, NDArray[Any]], array: NDArray[Any]) -> int:
    # the rollouts of a prompt share their pixels
    key = array.tobytes() + repr((array.dtype, array.shape)).encode()
    arrays.setdefault(key, array)
    return list(arrays).index(key)


def _kinds(
    number: Callable[[NDArray[Any]], int] = id, arrays: Sequence[NDArray[Any]] = ()
) -> Kinds:
    return {
        **models_of("xtuner"),
        "ray": (ray.ObjectRef, ray.get, ray.put),
        "array": (np.ndarray, number, arrays.__getitem__),
    }


def put_together(states: list[RolloutState]) -> tuple[list[XTunerState], dict[str, Any]]:
    """Return the rollouts that `taken_apart` was given, and their record. Raises WireError."""
    kept = states[0].extra[OF_RESPONSE]
    rest, arrays = plain_values.decode(kept["rollouts"])
    kinds = _kinds(arrays=arrays)
    group = []
    for ours, (same, fields) in zip(states, rest, strict=True):
        columns = {name: _theirs(ours, name) for name in same}
        group.append(XTunerState(**together(fields, kinds), **columns))
    return group, kept["record"]


def _ours(state: XTunerState, prompt: list[int] | None) -> RolloutState:
    ids, steps = state.response_ids or [], state.response_model_steps or []
    columns = {name: getattr(state, name) or [] for name in ("logprobs", "response_mask")}
    # a segment of an agent has those of its whole sequence
    fitting = {name: column for name, column in columns.items() if len(column) == len(ids) > 0}
    score = (state.reward or {}).get("score")
    messages = apart(state.message, _kinds())
    return RolloutState(
        messages=messages if len(repr(messages)) <= LONGEST else [],
        prompt_ids=prompt,
        response=state.response or "",
        response_ids=ids,
        spans=_spans(steps) if len(steps) == len(ids) else [],
        finish_reason=state.finish_reason,
        error=state.error_msg,
        reward={"score": score} if isinstance(score, int | float) and score == score else None,
        **{"logprobs": np.zeros(len(ids), "<f4"), **fitting},
    )


def _spans(steps: list[int]) -> list[VersionSpan]:
    starts = np.flatnonzero(np.diff(steps, prepend=-1)).tolist()
    ends = [*starts[1:], len(steps)] if steps else []
    return [VersionSpan(a, b - a, steps[a], "xtuner") for a, b in zip(starts, ends, strict=True)]


def _theirs(ours: RolloutState, name: str) -> Any:
    value = getattr(ours, OURS[name])
    if name == "response_model_steps":
        return [span.version for span in value for _ in range(span.length)]
    return value.tolist() if isinstance(value, np.ndarray) else value


FILE = "replay_buffer.json"

LIMITS = RunLimits(stale_threshold=10**9, order="fifo")  # XTuner decides what is too old

Key = tuple[str, int | None]
"""Task and group_id: the draw of a prompt, as XTuner's sampler numbers it."""


class RunStorage(theirs.NaiveStorage):  # type: ignore[misc]
    """XTuner's storage in memory; each group is in a run before it is here."""

    def __init__(self, url: str, run: str) -> None:
        super().__init__()
        self.repeated: set[Key] = set()
        """prompts that the data set gives again, though their groups were completed"""
        self._url, self._name = url, run or f"xtuner-{secrets.token_hex(4)}"
        self._run: Run | None = None
        self._gids: dict[int, str] = {}  # by XTuner's uid
        self._retried: dict[Key, str] = {}  # handed out to be finished
        self._position = Position()
        self._dropped: set[str] = set()
        self._puts = 0
        self._saved: dict[str, Any] = {}  # the newest checkpoint

    def opened(self) -> Run:
        """Return the run: without a checkpoint, one that has trained nothing."""
        return self._run or self.open({})

    async def put(self, item: theirs.StorageItem) -> int:
        """Add a group to the run, then here; a failed one only here."""
        run, gid = await asyncio.to_thread(self.opened), ""
        if item.status.value in ("completed", "aborted", "expired"):
            gid = await asyncio.to_thread(self._write, run, item)
        uid: int = await super().put(item)
        self._gids |= {uid: gid} if gid else {}
        return uid

    async def get(self, query: Any) -> list[theirs.StorageItem]:
        await asyncio.to_thread(self.opened)
        found: list[theirs.StorageItem] = await super().get(query)
        return found

    async def count(self, query: Any) -> int:
        await asyncio.to_thread(self.opened)
        return int(await super().count(query))

    async def delete(self, uids: list[int]) -> None:
        """Hand groups out, or forget them. They stay in the run until a checkpoint says so."""
        for uid in uids:
            item, gid = self._items[uid], self._gids.pop(uid, "")
            number = item.item[0].group_id
            if gid and item.status is not XTunerStatus.COMPLETED and number is not None:
                self._retried[item.task_name, number] = gid
            elif gid and item.item[0].status is XTunerStatus.COMPLETED:
                self._position.trained.add_batch(0, [gid])
            elif gid:
                self._dropped.add(gid)
        await super().delete(uids)

    def _write(self, run: Run, item: theirs.StorageItem) -> str:
        self._consumer.check_role()
        self._puts += 1
        record = {"status": item.status.value, "staleness": item.staleness}
        record |= {"task": item.task_name, "order": self._puts}
        states = taken_apart(item.item, record)
        key = item.task_name, item.item[0].group_id
        if key in self._retried:
            run.buffer.update(self._retried[key], states, ageless=True)
            return self._retried.pop(key)
        task = re.sub(r"[^A-Za-z0-9_.-]", "_", item.task_name)[:64]
        if task not in run.limits.tasks:
            tasks = {**run.limits.tasks, task: TaskLimits()}
            limits = run.limits.model_copy(deep=True, update={"tasks": tasks})
            Run.create(run.store, run.name, run.nonce, limits)
            run.refresh_limits()
        (gid,) = run.buffer.put(task, [states], ageless=True, retryable=True)
        return gid

    def open(self, saved: dict[str, Any]) -> Run:
        """Become the trainer of the run at a checkpoint, and read the groups that it has not seen.

        Raises RunNotFound, and RunExists for a run with checkpoints when `saved` is empty.
        """
        store = Store(self._url, name="xtuner")
        name = saved.get("run", self._name)
        try:
            run = Run.open(store, name)
        except RunNotFound:
            if saved:
                raise
            run = Run.create(store, name, new_nonce(), LIMITS)
        tasks = run.limits.training_tasks
        if not saved and any(int(run.progress(task).get("archived", 0)) for task in tasks):
            raise RunExists(f"run {name!r} was trained", hint="resume, or name another run")
        self._position = Position.model_validate(saved.get("position", {}))
        self._dropped = set(saved.get("dropped", ()))
        self.repeated = {(task, number) for task, number in saved.get("repeated", ())}
        self._consumer = RolloutConsumer(run, prefetch_bytes=0)
        # the server has ended what the checkpoint before this one has seen
        ended = Position.model_validate(saved.get("ended", {}))
        self._consumer.open(position=ended, take_over=True)
        self._saved = saved
        found = [group for task in tasks for group in self._unseen(run, task)]
        found.sort(key=lambda entry: int(entry[2]["order"]))
        self._puts = found[-1][2]["order"] if found else 0
        items = [
            theirs.StorageItem(
                group, n, n, record["task"], XTunerStatus(record["status"]), record["staleness"]
            )
            for n, (_, group, record) in enumerate(found, 1)
        ]
        last = len(items)
        self.load_state_dict({"items": items, "next_uid": last + 1, "next_timestamp_id": last + 1})
        self._gids = dict(enumerate((gid for gid, _, _ in found), 1))
        self._run = run
        return run

    def _unseen(self, run: Run, task: str) -> Iterator[tuple[str, list[XTunerState], Any]]:
        """Yield the groups of a task that are for later steps than the checkpoint."""
        first_new = self._saved.get("draws", {}).get(task, 0)
        for gid, fields in RecordWalk(run.store, run.keys).records(task):
            if fields["stage"] != "pool" or gid in self._position.trained or gid in self._dropped:
                continue
            group, record = put_together(run.buffer.read(payload_of(gid, fields)).states)
            if split_group_id(gid)[1] >= first_new:  # the data set will give its prompt again
                if record["status"] != "completed":
                    self._dropped.add(gid)
                    continue
                self.repeated |= {(record["task"], group[0].group_id)} - {(record["task"], None)}
            yield gid, group, record

    def save(self, folder: Path, policy: str) -> None:
        """Write what the weights have seen into a checkpoint; end what the one before has seen.

        Only the one before is certain to be complete: XTuner writes the weights after this.
        """
        run = self.opened()
        self._consumer.check_role()
        # XTuner saves while nothing is generated: these were not put again
        self._dropped |= set(self._retried.values())
        self._retried.clear()
        puts = {task: int(run.progress(task).get("put", 0)) for task in run.limits.training_tasks}
        saved = {
            "run": run.name,
            "policy": policy,
            "position": self._position.model_dump(),
            "ended": self._saved.get("position", {}),
            "dropped": sorted(self._dropped),
            "repeated": sorted(self.repeated),
            "draws": {task: IMPORTED_FROM + count for task, count in puts.items()},
        }
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / FILE, orjson.dumps(saved))
        before, self._saved = self._saved, saved
        seen = Position.model_validate(before.get("position", {}))
        EndedDraws(run.context, self._consumer.nonce).end(seen, ())
        for gid in before.get("dropped", ()):
            run.delete(gid)
            self._dropped.discard(gid)
        while run.janitor.sweep().has_more:
            pass
