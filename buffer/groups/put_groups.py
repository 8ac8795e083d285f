"""Put groups that no worker holds into a run: from a user's own loop, or from a file (`put.lua`).

They get draws (from `IMPORTED_FROM` on) and counters of their own: `enqueued + put + imported = sum
of all stages` (I1). From then on they are like any other group, and the producer starts that many
fewer. A lineage of weights that this run never had counts as old as the run's oldest fork (I8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from buffer.errors import ConfigError, MemoryFull, PayloadMissing, WireError
from buffer.groups.submit import described
from buffer.ids import IMPORTED_FROM, group_id, new_nonce
from buffer.job import PayloadRef
from buffer.limits import RunLimits
from buffer.readable import format_size
from buffer.redis.payloads import PROMPT, PayloadStore
from buffer.redis.scripts import Arg, unknown_reply
from buffer.redis.store import RunContext
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState, Status

_REFUSED = {
    Status.INIT: "nothing was generated yet: the producer starts prompts, from a data set",
    Status.FAILED: "what failed is not kept: generate it again",
    Status.FILTERED: "what was judged useless is not kept",
}


def stamped(
    states: Sequence[RolloutState], weights: PolicyVersion | None, ageless: bool
) -> list[RolloutState]:
    """Return copies of the rollouts, with tokens after the last span attributed to `weights`.

    `ageless`: no policy of this run made them. Raises WireError for a rollout with tokens, but
    without spans, unless one of the two is given: a guess would falsify its staleness (I9).
    """
    copies = [state.model_copy() for state in states]
    for state in copies:
        if weights is not None:
            state.stamp(weights)
        elif len(state.response_ids) and not state.spans and not ageless:
            raise WireError(
                f"rollout {state.index} has {len(state.response_ids)} tokens, but no spans that "
                "name the weights that made them",
                hint="pass weights=PolicyVersion(lineage, M), or ageless=True if no policy of this "
                "run made them",
            )
    return copies


def arguments_of(group: RolloutGroup, ref: PayloadRef, limits: RunLimits) -> dict[str, Arg]:
    """Return the arguments of `put` and `update` that describe a group and its bytes."""
    finite = group.scores[np.isfinite(group.scores)]
    reward = float(finite.sum()) if group.status is Status.COMPLETED else 0.0
    tokens = int(group.lengths.sum(dtype=np.int64))
    described_group = described(group, group.status, ref, limits)
    more = {"token_lead": limits.token_lead(group.task), "reward": f"{reward:.6g}"}
    return described_group | more | {"tokens": tokens}


class GroupPut:
    """Puts groups one after the other, as one operation."""

    def __init__(
        self, context: RunContext, payloads: PayloadStore, counter: Literal["put", "imported"]
    ) -> None:
        self._store, self._keys, self._limits, _ = context
        self._payloads = payloads
        self._counter = counter
        self._operation = new_nonce()
        # groups put so far by task: with the operation, the natural key of each call (I13)
        self._counts = dict.fromkeys(self._limits.training_tasks, 0)

    def close(self) -> None:
        """Delete the traces of the operation, of which no call will be repeated."""
        used = [task for task, count in self._counts.items() if count]
        self._store.send(
            "put", [("HDEL", self._keys.progress(task), f"put:{self._operation}") for task in used]
        )

    def check(self, group: RolloutGroup) -> None:
        """Raise the WireError or ConfigError that `put` would raise, before anything is stored."""
        if group.task not in self._counts:
            raise ConfigError(
                f"there is no training task {group.task!r}",
                hint=f"known: {', '.join(self._counts)}",
            )
        if hint := _REFUSED.get(group.status):
            raise WireError(f"a group of {group.task} is {group.status}", hint=hint)
        group_bytes.encode_checked(group)
        arguments_of(group, PayloadRef("", "", 0, 0, ""), self._limits)

    def put(
        self, task: str, make: Callable[[str], RolloutGroup], *, retryable: bool
    ) -> tuple[str, str]:
        """Put the group that `make` returns for a gid; return the gid and where the group is.

        That is completed, aborted, expired or dropped: members that are too stale for the next
        train step start again if `retryable`, else their group is dropped.
        """
        progress = self._keys.progress(task)
        counts = self._store.ask("put", "HMGET", progress, "put", "imported")
        draw = IMPORTED_FROM + sum(int(count or 0) for count in counts)
        for _ in range(100):  # another import may take the draw first
            gid = group_id(task, draw)
            match self._call(make(gid), draw, retryable):
                case ["OK", status]:
                    self._counts[task] += 1
                    return gid, status
                case ["DRAW", next_draw]:
                    draw = int(next_draw)
                case ["NO_DRAWS", cursor]:
                    raise ConfigError(
                        f"{task} has drawn {cursor} groups: no draws are left for others"
                    )
                case ["FULL", held, mark]:
                    raise MemoryFull(
                        f"the run holds {format_size(int(held))} of payloads, and accepts no more "
                        f"above {format_size(int(mark))}",
                        hint="let the trainer commit what it took, then try again",
                    )
                case ["MISSING", size]:
                    raise PayloadMissing(f"group {gid}: {size} bytes arrived", hint="put it again")
                case reply:
                    raise unknown_reply("put", reply)
        raise ConfigError(
            f"{task}: another import takes every draw", hint="wait until that import has finished"
        )

    def _call(self, group: RolloutGroup, draw: int, retryable: bool) -> list[str]:
        keys = self._keys
        gid = group.gid
        task = group.task
        token = new_nonce()
        prompt = group_bytes.encode(prompt_of(group))
        self._payloads.write_prompts({gid: prompt}, token=token + PROMPT)
        ref = self._payloads.write(gid, token, group_bytes.encode(group))
        payloads = [keys.payload(gid, token + PROMPT), keys.payload(gid, "init")]
        return self._store.call(
            "put",
            keys.slots(task=task),
            {
                "task": task,
                "gid": gid,
                "token": token,
                "operation": self._operation,
                "place": self._counts[task] + 1,
                "counter": self._counter,
                "draw": draw,
                "first": IMPORTED_FROM,
                "threshold": self._limits.threshold(task),
                "retryable": int(retryable),
                "byte_limit": self._limits.high_bytes,
                **arguments_of(group, ref, self._limits),
                "prompt": len(prompt),
            },
            payloads + keys.payload_chunks(gid, token, ref.chunks),
            durable=True,
        )


def prompt_of(group: RolloutGroup) -> RolloutGroup:
    """Return the group without its responses, as it is when it starts again."""
    states = [state.model_copy() for state in group.states]
    for state in states:
        state.reset_response()
    return RolloutGroup(group.gid, group.task, states)
