"""Clear a run whose server lost a part of it, so that it is made anew from a checkpoint (I6).

    regenerate.lua                clear_keys              create_run.lua          trainer_open.lua
    meta: REGENERATING,    ─▶     all but the      ─▶     meta, control and  ─▶   asserts what the
    control is gone               settings go             ledger of a new run     checkpoint proves

The first step fences all processes of the run; payloads that a worker writes later expire. If a
process dies between two steps, the run cannot be opened until the same command continues.
`continues` in `meta` names the run of the checkpoint, with which a trainer may open the empty run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis

from buffer.errors import RolloutMQError, RunExists
from buffer.ledger.position import Position
from buffer.limits import REGENERATING
from buffer.maintenance.remove_run import clear_keys
from buffer.redis.keys import Keys
from buffer.redis.scripts import opened
from buffer.redis.store import Store


@dataclass(frozen=True, slots=True)
class RunLeftovers:
    """What a server still has of a run that is to be cleared.

    `groups`: records of untrained groups. `steps`: train steps after the checkpoint.
    `added_by_hand`: untrained groups that were imported or put; None if unknown.
    """

    groups: int
    steps: int
    added_by_hand: int | None


class Regeneration:
    """Clears a run for `Run.create`, which then makes it again to continue a checkpoint.

    `position`: of the newest checkpoint, or empty to start from step 1. `take_over`: even while
    another trainer is alive.
    """

    def __init__(self, position: Position, *, take_over: bool = False) -> None:
        self.position = position
        self._take_over = take_over

    def leftovers(self, store: Store, name: str, tasks: list[str]) -> RunLeftovers:
        """Count what the server still has of the run, as far as it can be read. O(keys)."""
        store = store.at(Keys(name).meta)
        keys = Keys(name)

        def count() -> int:
            found = (
                client.scan_iter(f"{keys.groups}*", count=1000)
                for _, client in store.servers.masters()
            )
            return sum(1 for names in found for _ in names)

        groups = store.retrying("leftovers", count)
        taken = _number(store, keys.ledger("train"), "taken") or 0
        entered = [
            _number(store, keys.progress(task), field)
            for task in tasks
            for field in ("put", "imported")
        ]
        known = [count for count in entered if count is not None]
        trained = sum(map(len, self.position.trained.imported.values()))
        added_by_hand = max(0, sum(known) - trained) if len(known) == len(entered) else None
        return RunLeftovers(groups, max(0, taken - self.position.step), added_by_hand)

    def describe(self, run: str, left: RunLeftovers) -> str:
        """Return in a sentence what is kept, and what is generated again or lost."""
        position = self.position
        tasks = {*position.trained.tasks, *position.trained.imported}
        trained = sum(map(position.trained.count, tasks))
        base = f"the checkpoint of step {position.step}" if position.step else "no checkpoint"
        kept = f"{base}: {trained} groups are trained, and stay so" if position.step else base
        again = f"{left.groups} groups that the server has, {left.steps} steps after it"
        text = f"run {run!r} is made again from {kept}. Cleared, and generated again: {again}"
        if left.added_by_hand:
            text += f". Not generated again: {left.added_by_hand} groups that were imported or put"
        return text

    def clear(self, store: Store, keys: Keys, nonce: str, timeout_ms: int) -> None:
        """Fence all processes of the run and remove all of its keys but the settings.

        Raises RunExists for another run of the name, RoleHeld while a trainer is alive.
        """
        reply = store.call(
            "regenerate",
            keys.slots(),
            {
                "nonce": nonce,
                "schema": REGENERATING,
                "take_over": int(self._take_over),
                "timeout_ms": timeout_ms,
            },
            durable=True,
        )
        match opened(reply, "trainer", keys.run):
            case ["EXISTS", other]:
                raise RunExists(
                    f"another run named {keys.run!r} is on this server (nonce {other[:8]}…)",
                    hint="choose another [run] name, or use the folder that belongs to it",
                )
        clear_keys(store, keys, (keys.meta,))


def _number(store: Store, key: str, field: str) -> int | None:
    """Return a count of a hash that may be damaged; None where it cannot be read."""
    try:
        value: Any = store.ask("leftovers", "HGET", key, field)
        return int(value or 0)
    except (RolloutMQError, redis.RedisError, ValueError):
        return None
