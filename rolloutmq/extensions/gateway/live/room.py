"""The live groups of one gateway process, and the programs that wait for one.

    POST /sessions ──wanted──▶ claim ──▶ a group without an opening ──take──▶ opened, kept, keys out
    another gateway died ──▶ claim (lane resume) ──▶ a group with its opening: the same keys work

Whoever holds the group's lease has its sessions. Its claim, its opening, its turns and its rewards
are on the server before anybody is told; so a gateway may die at any line:

    before the opening is kept   the group waits again; the program got no key, and asks again
    after it                     the keys work at the next gateway, behind the kept turns
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from buffer.errors import GroupAbandoned, JudgeInterrupted
from buffer.ids import split_group_id
from buffer.wire.rollout import RolloutState
from producer_workers.agent_loops.agent_loop import Vacancy
from producer_workers.work_time import timeout
from rolloutmq.extensions.gateway.agents import AgentTask, Earned
from rolloutmq.extensions.gateway.live.secret import Secret, SessionName


@dataclass(slots=True)
class Seat:
    """One session whose program may talk. `earned`: its reward.

    It is settled once the reward is on the server (`is_kept`), or its group has left.
    """

    earned: asyncio.Future[Earned] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    is_kept: bool = False

    @property
    def has_reward(self) -> bool:
        """Whether it has its reward; a pause cancels the wait for one, and Skip ends it."""
        return self.earned.done() and not (self.earned.cancelled() or self.earned.exception())

    def settle(self, *, is_kept: bool) -> None:
        self.is_kept |= is_kept
        self.settled.set()


@dataclass(slots=True)
class LiveGroup:
    gid: str
    states: Sequence[RolloutState]
    trains_all: bool  # conversations beside the task's, too
    opening: dict[str, Any] | None = None
    seats: dict[int, Seat] = field(default_factory=lambda: defaultdict(Seat))  # by rollout
    tasks: dict[int, AgentTask] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def size(self) -> int:
        return len({state.index for state in self.states})


class LiveRoom:
    """`ttl_s`: seconds from its opening, without waits for a quota, in which a group earns rewards.

    `on_demand` is called when a program wants a group; the worker claims within `limit_claim`.
    """

    def __init__(self, secret: Secret, ttl_s: float) -> None:
        self.secret = secret
        self.ttl_s = ttl_s
        self.groups: dict[str, LiveGroup] = {}
        self.on_demand: Callable[[], None] = lambda: None
        self._asked: dict[str, deque[asyncio.Future[LiveGroup]]] = defaultdict(deque)
        self._offers: dict[str, deque[asyncio.Future[asyncio.Future[LiveGroup]]]] = defaultdict(
            deque
        )

    # -- for programs

    async def take(self, task: str, timeout_s: float) -> LiveGroup:
        """Return a group that is opened for the caller, with all of its tasks.

        Raises TimeoutError if none could be claimed in time.
        """
        asked = self._asked[task]
        answer: asyncio.Future[LiveGroup] = asyncio.get_running_loop().create_future()
        asked.append(answer)
        try:
            async with asyncio.timeout(timeout_s):
                self._match(task)
                self.on_demand()
                group = await answer
                async with group.changed:
                    await group.changed.wait_for(lambda: len(group.tasks) == group.size)
                return group
        finally:
            if answer in asked:
                asked.remove(answer)

    # -- for the loop

    async def offered(self, group: LiveGroup) -> asyncio.Future[LiveGroup]:
        """Wait until a program takes the group; return where it waits. Raises JudgeInterrupted."""
        task = split_group_id(group.gid)[0]
        offer: asyncio.Future[asyncio.Future[LiveGroup]]
        offer = asyncio.get_running_loop().create_future()
        offers = self._offers[task]
        offers.append(offer)
        try:
            self._match(task)
            return await offer
        finally:
            if offer in offers:
                offers.remove(offer)

    def _match(self, task: str) -> None:
        offers, asked = self._offers[task], self._asked[task]
        while offers and asked:
            offers.popleft().set_result(asked.popleft())

    def limit_claim(self, vacancy: Vacancy, held: int) -> Vacancy:
        """Return the room for groups that go on, and for those that programs wait for."""
        wanted = {task: len(asked) for task, asked in self._asked.items() if asked}
        # a group that is held and not opened is for the next program
        unopened = held - sum(group.opening is not None for group in self.groups.values())
        missing = sum(wanted.values()) - unopened
        serves = vacancy.serves
        if missing <= 0:
            return replace(vacancy, serves=replace(serves, lanes=serves.lanes - {"fresh"}))
        serves = replace(serves, tasks=serves.tasks & wanted.keys())
        return replace(vacancy, limit=min(vacancy.limit, missing), serves=serves)

    def interrupt(self) -> None:
        """Take back what no program has taken: the run pauses."""
        for offers in self._offers.values():
            while offers:
                offers.popleft().set_exception(JudgeInterrupted("no program wanted the group"))

    def leave(self, group: LiveGroup) -> None:
        """Forget a group, and tell those that wait for its rewards to be kept."""
        del self.groups[group.gid]
        for seat in group.seats.values():
            seat.settle(is_kept=False)

    def seat_of(self, session_id: str) -> Seat:
        gid, _, number = session_id.rpartition("/")
        return self.groups[gid].seats[int(number)]

    def name(self, group: LiveGroup, index: int) -> SessionName:
        assert group.opening
        return SessionName(group.gid, index, group.opening["nonce"])

    async def earned(self, task: AgentTask) -> Earned:
        """Wait for the reward of a session. Raises Skip; GroupAbandoned when it is too late."""
        gid, _, number = task.session_id.rpartition("/")
        group = self.groups[gid]
        assert group.opening
        seat = group.seats[int(number)]
        left_s = group.opening["at_s"] + self.ttl_s - time.time()
        try:
            async with timeout(max(0.0, left_s)) as work:
                async with group.changed:
                    group.tasks[int(number)] = task
                    group.changed.notify_all()
                return await seat.earned
        except TimeoutError as error:
            raise GroupAbandoned(
                f"{gid}: no reward within {self.ttl_s:g} s", hint="see [gateway] session_ttl_s"
            ) from error
        finally:  # waits for a quota are not counted at the next gateway either
            later_s = time.time() + work.left_s - self.ttl_s
            group.opening["at_s"] = max(group.opening["at_s"], later_s)
