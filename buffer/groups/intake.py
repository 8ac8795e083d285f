"""Groups that come in without a lease: from a loop of your own, or from a file (`put.lua`).

They are numbered apart from those of the data set (`keys.IMPORTED_FROM`) and counted apart:
`enqueued + put + imported = sum of all places` (I1). From then on they are groups like any other:
taken in the order of the run's policy, the producer starts that many fewer, and one that expires
starts again from its prompt. A lineage of weights that this run never had counts as old as its
oldest fork (I8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from buffer.errors import ConfigError, MemoryFull, PayloadMissing, ScriptError, WireError
from buffer.model import wire
from buffer.model.byte_size import format_size
from buffer.model.group import RolloutGroup, prompt_of
from buffer.model.ids import IMPORTED_FROM, group_id, new_nonce
from buffer.model.job import PayloadRef
from buffer.model.limits import RunLimits
from buffer.model.order_policy import OrderFunction, submit_argument
from buffer.model.rollout import PolicyVersion, RolloutState, Status
from buffer.store.keys import Keys
from buffer.store.payloads import PROMPT, PayloadStore, pin_listed
from buffer.store.store import Store

_RACES = 100
"""How often a draw may be taken by somebody else before this one gives up."""

_HINTS = {
    Status.INIT: "nothing was generated yet: the producer starts prompts, from a data set",
    Status.FAILED: "what failed is not kept: generate it again",
    Status.FILTERED: "what was judged useless is not kept",
}


def stamped(
    states: Sequence[RolloutState], weights: PolicyVersion | None, ageless: bool
) -> list[RolloutState]:
    """Copies of the rollouts, whose tokens behind the last span were made by `weights`.

    Without `weights`, a rollout with tokens and no span at all raises WireError: a guess would be a
    lie about its age (I9). `ageless` says that no policy of this run made them.
    """
    copies = [state.model_copy() for state in states]
    for state in copies:
        if weights is not None:
            state.stamp(weights)
        elif len(state.response_ids) and not state.spans and not ageless:
            raise WireError(
                f"rollout {state.index} does not say which weights made its {len(state.response_ids)} tokens",
                hint="give weights=PolicyVersion(lineage, M), or ageless=True if no policy of this run did",
            )
    return copies


def described(
    group: RolloutGroup, ref: PayloadRef, limits: RunLimits, function: OrderFunction | None
) -> dict[str, int | str]:
    """What the scripts `put` and `update` are told of a group and its bytes."""
    scores = (
        group.scores[np.isfinite(group.scores)] if group.status is Status.COMPLETED else np.zeros(0)
    )
    return {
        "status": group.status.value,
        "samples": len(group),
        "tokens": int(group.lengths.sum(dtype=np.int64)),
        "size": ref.size,
        "crc": ref.crc,
        "reward": f"{float(scores.sum()):.6g}",
        "order": _turn(group, limits, function),
        "lag": limits.token_lag(group.task),
        "chunks": ref.chunks,
    }


def _turn(group: RolloutGroup, limits: RunLimits, function: OrderFunction | None) -> str:
    if group.status is not Status.COMPLETED or limits.tasks[group.task].eval_of is not None:
        return ""
    return submit_argument(limits.order, group, function)


class Intake:
    """One call that puts groups, one after the other. Close it, so that nothing of it stays in
    Redis.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        limits: RunLimits,
        payloads: PayloadStore,
        counter: Literal["put", "imported"],
        function: OrderFunction | None = None,
    ) -> None:
        """`function`: the run's order policy where it is a user's
        (`buffer.model.order_policy.load_order`).
        """
        self._store = store
        self._keys = keys
        self._limits = limits
        self._payloads = payloads
        self._counter = counter
        self._function = function
        self._operation = new_nonce()
        self._places = dict.fromkeys(limits.training_tasks, 0)

    def close(self) -> None:
        """Forget the operation: nothing of it will be repeated any more."""
        used = [task for task, place in self._places.items() if place]
        self._store.each(
            "put", [("HDEL", self._keys.progress(task), f"put:{self._operation}") for task in used]
        )

    def check(self, group: RolloutGroup) -> None:
        """Raise what `put` would raise, before anything is stored: WireError or ConfigError."""
        if group.task not in self._places:
            raise ConfigError(
                f"there is no training task {group.task!r}",
                hint=f"known: {', '.join(self._places)}",
            )
        if group.status in _HINTS:
            raise WireError(f"a group of {group.task} is {group.status}", hint=_HINTS[group.status])
        _turn(group, self._limits, self._function)

    def put(
        self, task: str, make: Callable[[str], RolloutGroup], *, retryable: bool
    ) -> tuple[str, str]:
        """Put the group that `make` gives for a gid; returns its gid, and where it is: completed,
        aborted, expired or dropped.

        One that is too old for the next train step starts again from its prompt, if `retryable`;
        else it is dropped.
        """
        draw = self._next_draw(task)
        for _ in range(_RACES):
            gid = group_id(task, draw)
            reply = self._call(make(gid), draw, retryable)
            match reply[0]:
                case "OK":
                    self._places[task] += 1
                    return gid, reply[1]
                case "DRAW":
                    draw = int(reply[1])
                case "NO_DRAWS":
                    raise ConfigError(
                        f"{task} has drawn {reply[1]} groups: no numbers are left for others"
                    )
                case "FULL":
                    held, mark = (format_size(int(n)) for n in reply[1:3])
                    raise MemoryFull(
                        f"the run holds {held} of payloads, and nothing is taken in above {mark}",
                        hint="let the trainer commit what it took, then try again",
                    )
                case "MISSING":
                    raise PayloadMissing(
                        f"group {gid}: {reply[1]} bytes arrived", hint="put it again"
                    )
                case _:
                    raise ScriptError(f"put: {reply}")
        raise ConfigError(
            f"{task}: somebody else takes every draw", hint="let one import finish first"
        )

    def _next_draw(self, task: str) -> int:
        progress = self._keys.progress(task)
        counts = self._store.retrying(
            "put", lambda: self._store.control.hmget(progress, "put", "imported")
        )
        return IMPORTED_FROM + sum(int(count or 0) for count in counts)

    def _call(self, group: RolloutGroup, draw: int, retryable: bool) -> list[str]:
        keys = self._keys
        gid = group.gid
        task = group.task
        token = new_nonce()
        prompt = wire.encode(prompt_of(group))
        self._payloads.write_prompts({gid: prompt}, token=token + PROMPT)
        ref = self._payloads.write(gid, token, wire.encode(group))
        payloads = [keys.payload(gid, token + PROMPT), keys.payload(gid, "init")]
        reply = self._store.call(
            "put",
            keys.slots(task=task),
            {
                "task": task,
                "gid": gid,
                "token": token,
                "operation": self._operation,
                "place": self._places[task] + 1,
                "counter": self._counter,
                "draw": draw,
                "first": IMPORTED_FROM,
                "threshold": self._limits.stale_threshold,
                "retryable": int(retryable),
                "mark": self._limits.high_bytes,
                **described(group, ref, self._limits, self._function),
                "prompt": len(prompt),
            },
            keys.in_slot(payloads + keys.payload_chunks(gid, token, ref.chunks)),
            group.made_by(self._limits.token_lag(task) != ""),
            durable=True,
        )
        pin_listed(self._store, keys)
        return reply
