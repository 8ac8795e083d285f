"""States of a whole run, and what can happen in each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from buffer.groups.claim import Claim
from buffer.job import Job, PayloadRef
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.scripts import Script
from buffer.redis.server import in_memory
from buffer.run.run import Run
from buffer.wire.rollout import PolicyVersion
from proofs.model_check import operations
from proofs.model_check.call_invariants import STALE, check_call, check_caller
from proofs.model_check.canonical import LEASE_MS, Keys
from proofs.model_check.operations import TASK, Called, Finished, Pending, SteppedStore
from proofs.model_check.processes import FIRST, Process, Producer, Start, Trainer
from proofs.model_check.server_image import START_S, Clock, Image, Images, frozen
from proofs.model_check.state_invariants import check_state

RUN_NONCE = "f" * 32
_numbers = count()


class Budget(NamedTuple):
    """How often each fault may happen in one history, and each move that could repeat for ever."""

    deaths: int = 0
    lost_replies: int = 0
    late_calls: int = 0
    """calls that arrive at any later point: a second time, or after the death of their sender"""
    ticks: int = 0
    """the clock advances by 0.45 leases, which is no outage"""
    jumps: int = 0
    """the clock advances by five leases: an outage, or a server that was suspended"""
    setbacks: int = 0
    """the clock is set back by two leases"""
    aborts: int = 0
    failures: int = 0
    handbacks: int = 0
    filters: int = 0
    turns: int = 0
    """times that a worker keeps two turns of an agent"""
    pauses: int = 0
    commands: int = 0
    bad_groups: int = 0
    """groups that the trainer cannot use"""
    older: int = 0
    """a trainer opens the checkpoint before its newest one"""
    side_calls: int = 0
    """calls of a role beside its work: heartbeats, halts, targets, pauses"""


SLICED = {"commit", "forget", "rescore"}
"""Scripts that do a bounded part of their work: a repeated call does the next one."""

SETTINGS: dict[str, Any] = {"stale_threshold": STALE, "max_tries": 2, "lease_ms": LEASE_MS}
"""limits of every run"""

_CLOCK_S = {"ticks": 0.45, "jumps": 5.0, "setbacks": -2.0}


@dataclass(frozen=True)
class State:
    """The server, and each process."""

    image: Image
    now_s: float
    processes: tuple[Process, ...]
    late: tuple[Pending, ...]
    budget: Budget
    serial: int
    """makes new nonces; no part of what the state is"""


class Move(NamedTuple):
    """Something that can happen: `label` names it, `happen` returns the state after it."""

    label: str
    happen: Callable[[], State | None]


class World:
    """Carries out moves on one in-memory server."""

    def __init__(
        self,
        limits: Mapping[str, Any],
        prepare: Callable[[Run], None],
        scripts: Mapping[str, Script] | None = None,
    ) -> None:
        """Make a run in which `prepare` has happened; `scripts`: instead of the product's."""
        self.clock = Clock()
        self.store = SteppedStore(f"memory://check-{next(_numbers)}")
        self.store.around = self._carry_out
        if scripts is not None:
            self.store.scripts = scripts
        self.limits = RunLimits(**{"tasks": {TASK: TaskLimits()}, **SETTINGS, **limits})
        with frozen(self.clock):
            self.run = Run.create(self.store, "run", RUN_NONCE, self.limits, FIRST, "/0")
        self.database = in_memory._servers[self.store.url].dbs[0]
        with frozen(self.clock):
            prepare(self.run)
        self.images = Images(self.database)
        self.first = self.images.take()
        self.keys = Keys()
        self.calls = 0
        self._histories: dict[PayloadRef, tuple[PolicyVersion, ...]] = {}
        self._known: dict[Any, tuple[Image, Called | Finished, Finished | None]] = {}

    def close(self) -> None:
        self.store.close()
        del in_memory._servers[self.store.url]

    def start(self, processes: tuple[Process, ...], budget: Budget) -> State:
        state = State(self.first, START_S, (), (), budget, 0)
        for number, process in enumerate(processes):
            name, state = self.new_name(state)
            first = process.reborn(lambda name=name: name)  # type: ignore[misc]
            state = replace(state, processes=(*state.processes, first))
            if isinstance(process, Producer | Trainer) and process.is_opened_first:
                (opening,) = first.starts(lambda: "")
                state = self.carry_out(state, number, opening)
        return state

    def key_of(self, state: State) -> bytes:
        """Return the name of a state, the same for states that behave alike."""
        rest = (state.processes, sorted(map(repr, state.late)), state.budget)
        return self.keys.key_of(state.image, int(state.now_s * 1000), rest)

    # -- what can happen -----------------------------------------------------

    def moves(self, state: State) -> Iterator[Move]:
        for number, process in enumerate(state.processes):
            yield from self._moves_of(state, number, process)
            if state.budget.deaths and process.name not in ("janitor", "operator"):
                dead = spend(state, "deaths")
                yield Move(f"{process.name} dies", partial(self.replace_process, dead, number))
        for number, pending in enumerate(state.late):
            yield Move(f"late {pending.name}", partial(self._arrive, state, number))
        for name, leases in _CLOCK_S.items():
            if getattr(state.budget, name):
                yield Move(name, partial(self.advance_clock, spend(state, name), leases))

    def _moves_of(self, state: State, number: int, process: Process) -> Iterator[Move]:
        for slot, pending in enumerate(process.under_way):
            if pending is not None:
                yield from self._steps(state, number, slot, pending)
        name, named = self.new_name(state)
        for start in process.starts(lambda: name):
            if not start.costs or getattr(state.budget, start.costs):
                paid = spend(named, start.costs) if start.costs else named
                yield from self._begin(paid, number, start)

    def _begin(self, state: State, number: int, start: Start) -> Iterator[Move]:
        begun = under_way(state, number, start.slot, start.pending)
        if start.slot:
            # what a heartbeat reports may be old when it arrives
            label = f"{state.processes[number].name} starts {start.pending.name}"
            yield Move(label, partial(replace, begun))
        else:
            yield from self._steps(begun, number, start.slot, start.pending)

    def _steps(self, state: State, number: int, slot: int, pending: Pending) -> Iterator[Move]:
        label = f"{state.processes[number].name}: {pending.name} {_brief(pending)}"
        step = partial(self.step, state, number, slot, pending)
        yield Move(label, step)
        if state.budget.lost_replies:
            yield Move(f"{label}, reply lost", partial(step, is_lost=True))
        if state.budget.late_calls:
            yield Move(f"{label}, and again later", partial(step, is_late=True))
        if state.budget.late_calls and state.budget.deaths:
            paid = spend(spend(state, "late_calls"), "deaths")
            sent = replace(paid, late=(*state.late, pending))
            yield Move(
                f"{label} is on its way as its sender dies",
                partial(self.replace_process, sent, number),
            )

    # -- what happens --------------------------------------------------------

    def replace_process(self, state: State, number: int) -> State:
        name, named = self.new_name(state)
        return _with(named, number, state.processes[number].reborn(lambda: name))

    def advance_clock(self, state: State, leases: float) -> State:
        return replace(state, now_s=state.now_s + leases * LEASE_MS / 1000)

    def step(
        self,
        state: State,
        number: int,
        slot: int,
        pending: Pending,
        is_lost: bool = False,
        is_late: bool = False,
    ) -> State | None:
        """Carry out the next call of an operation.

        `is_lost`: its reply does not arrive; None if the call changed nothing, which is the same as
        a call that was lost before it arrived. `is_late`: it arrives once more later.
        """
        image, came, over = self._call(state, pending)
        after = replace(state, image=image)
        if is_lost:
            return None if image.numbers == state.image.numbers else spend(after, "lost_replies")
        if is_late:
            after = replace(spend(after, "late_calls"), late=(*after.late, pending))
        if over is not None:
            return self._ended(after, number, slot, pending, over)
        assert isinstance(came, Called)
        further = pending._replace(replies=(*pending.replies, came.reply))
        return under_way(after, number, slot, further)

    def carry_out(self, state: State, number: int, start: Start) -> State:
        """Carry out an operation of a process from its first call to its last."""
        state = under_way(state, number, start.slot, start.pending)
        while (pending := state.processes[number].under_way[start.slot]) is not None:
            after = self.step(state, number, start.slot, pending)
            assert after is not None
            state = after
        return state

    def _call(
        self, state: State, pending: Pending
    ) -> tuple[Image, Called | Finished, Finished | None]:
        """Carry out the next call of an operation.

        Return the server after it, the reply, and how the operation ended if it is over.
        """
        name = (state.image.numbers, state.now_s, pending)
        if name not in self._known:
            image, came = self._call_server(state, pending)
            over = came if isinstance(came, Finished) else self._over(pending, came)
            if over is not None and isinstance(over.result, Claim):
                self._read_histories(over.result.jobs)
            self._known[name] = (image, came, over)
        return self._known[name]

    def _call_server(self, state: State, pending: Pending) -> tuple[Image, Called | Finished]:
        self.clock.now_s = state.now_s
        self.images.put_back(state.image)
        came = operations.advance(self.run, self.store, pending)
        image = self.images.take()
        if isinstance(came, Called) and pending.name != "pause":
            now_ms = int(state.now_s * 1000)
            check_caller(came, pending.args, state.image, image, now_ms, self.limits)
        check_state(image, self.limits)
        return image, came

    def _over(self, pending: Pending, came: Called) -> Finished | None:
        further = pending._replace(replies=(*pending.replies, came.reply))
        return operations.is_over(self.run, self.store, further)

    def _ended(
        self, state: State, number: int, slot: int, pending: Pending, over: Finished
    ) -> State:
        made_by = lambda job: self._histories[job.payload]  # noqa: E731
        return _with(state, number, state.processes[number].ended(slot, pending, over, made_by))

    def _read_histories(self, jobs: list[Job]) -> None:
        """Note the weights of the tokens that jobs have, while the server has their bytes."""
        for job in jobs:
            if job.payload not in self._histories:
                self._histories[job.payload] = operations.made_by(self.run, job)

    def _arrive(self, state: State, number: int) -> State:
        image, _, _ = self._call(state, state.late[number])
        left = (*state.late[:number], *state.late[number + 1 :])
        return replace(state, image=image, late=left)

    def _carry_out(self, what: str, operation: Callable[[], Any]) -> Any:
        """Call the server twice: the second call must change nothing (I13)."""
        self.calls += 1
        before = self.images.take()
        reply = operation()
        after = self.images.take()
        check_call(what, before, after, reply)
        again = operation()
        changed = _changed(after, self.images.take())
        assert not changed or what in SLICED, f"I13: {what}, repeated, changed {changed}"
        if what in ("claim", "take_batch", "enqueue"):
            assert again == reply, f"I13: {what} replied {reply}, then {again}"
        assert _code(again) == _code(reply) or what == "deregister", (
            f"I13: {what}: {reply}, {again}"
        )
        return reply

    def new_name(self, state: State) -> tuple[str, State]:
        text = hashlib.sha256(str(state.serial).encode()).hexdigest()
        return "q" + text[:31], replace(state, serial=state.serial + 1)


def spend(state: State, fault: str) -> State:
    left = state.budget._replace(**{fault: getattr(state.budget, fault) - 1})
    return replace(state, budget=left)


def _with(state: State, number: int, process: Process) -> State:
    processes = (*state.processes[:number], process, *state.processes[number + 1 :])
    return replace(state, processes=processes)


def under_way(state: State, number: int, slot: int, pending: Pending) -> State:
    process: Any = state.processes[number]
    slots = tuple(pending if n == slot else other for n, other in enumerate(process.under_way))
    return _with(state, number, process._replace(under_way=slots))


def _changed(before: Image, after: Image) -> dict[bytes, Any]:
    keys = before.keys() | after.keys()
    return {
        key: (before.get(key), after.get(key))
        for key in keys
        if before.get(key) is not after.get(key)
    }


def _code(reply: Any) -> str:
    """Return the first word of what a script replied; a pipeline returns a list of replies."""
    while isinstance(reply, list) and reply:
        reply = reply[0]
    return reply if isinstance(reply, str) else ""


def _brief(pending: Pending) -> str:
    return " ".join(str(getattr(arg, "gid", arg))[:12] for arg in pending.args if arg)[:60]
