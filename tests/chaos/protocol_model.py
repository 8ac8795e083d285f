"""Take, checkpoint, commit and rollback as a state machine that is searched to its end.

Groups of two tasks are consumed by trainers, a batch of some of each task at a time. Trainers
crash, are replaced while they live, and go on from their last checkpoint; the server may lose every
step since it last reached its disk, as a whole (one log: a script is one entry of it), or each of
two shards by itself. Every order of all of that is tried.

    take       the recorded batch of a step, or the next groups of both tasks, all or nothing (I4, I5)
    train      the groups are in the weights; a group that is in them already is the failure looked for
    checkpoint the weights, with what they have seen, are on the trainer's disk
    commit     what the oldest kept checkpoint does not need any more is gone (I6)
    open       a trainer starts from a checkpoint; every other one is fenced by its nonce (I7)
    assert     what the checkpoint has seen is taken out of the pools again, by value (reassertion)

A variant leaves one rule out. The one without omissions must have no failure; each other one must
have one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count

Groups = frozenset[tuple[int, int]]
"""(task, number)"""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a variant of the protocol does."""

    recorded: bool = True
    """a step that was taken comes again as it was"""
    fenced: bool = True
    """only the trainer that was opened last may take and commit"""
    commit_after_checkpoint: bool = True
    refuses_gap: bool = True
    """a step is only taken behind the last one that was"""
    durable_take: bool = True
    """a take is answered once it is on disk"""
    reasserts: bool = True
    """opening takes out by value what the checkpoint has seen"""
    one_log: bool = True
    """both tasks lie in one log; else two shards may lose different amounts"""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is searched."""

    groups: int = 2
    """of each of two tasks"""
    batch: int = 1
    """of each task in a step"""
    crashes: int = 2
    losses: int = 1
    zombies: int = 1


@dataclass(frozen=True, slots=True)
class Server:
    """What the server knows."""

    ready: Groups
    batches: tuple[tuple[int, Groups], ...] = ()
    taken: int = 0
    committed: int = 0
    nonce: int = 0


@dataclass(frozen=True, slots=True)
class Trainer:
    """What is in the memory of a trainer. `step`: the last one that is in its weights; `batch`:
    taken, not trained.
    """

    nonce: int
    step: int
    seen: Groups
    batch: Groups | None = None


@dataclass(frozen=True, slots=True)
class State:
    server: Server
    disk: Server
    """the server as it would come back"""
    checkpoint: tuple[int, Groups]
    trainers: tuple[Trainer, ...]
    crashes: int = 0
    losses: int = 0
    zombies: int = 0


class Twice(Exception):
    """A group is in the same weights twice; or one that no place holds any more was never trained."""


def moves(state: State, rules: Rules, size: Size) -> Iterator[State]:
    """Every state that may come next. Raises Twice."""
    for place, trainer in enumerate(state.trainers):
        others = state.trainers[:place] + state.trainers[place + 1 :]
        for server, checkpoint, changed in _steps(state, trainer, rules, size):
            kept = (*others, changed) if changed else others
            disk = server if rules.durable_take and server is not state.server else state.disk
            trainers = tuple(sorted(kept, key=_key))
            yield replace(state, server=server, disk=disk, checkpoint=checkpoint, trainers=trainers)
        if state.crashes < size.crashes:
            yield replace(state, trainers=others, crashes=state.crashes + 1)
    if not state.trainers or (state.zombies < size.zombies and len(state.trainers) == 1):
        yield _open(state, rules, bool(state.trainers))
    if state.disk != state.server:
        yield replace(state, disk=state.server)
    if state.losses < size.losses:
        yield from (
            replace(state, server=lost, disk=lost, losses=state.losses + 1)
            for lost in _lost(state, rules)
        )


def _key(trainer: Trainer) -> tuple[int, int]:
    return trainer.nonce, trainer.step


def _steps(
    state: State, trainer: Trainer, rules: Rules, size: Size
) -> Iterator[tuple[Server, tuple[int, Groups], Trainer | None]]:
    """What one trainer may do next: (server, checkpoint, the trainer after it)."""
    server = state.server
    checkpoint = state.checkpoint
    may_act = not rules.fenced or server.nonce == trainer.nonce
    if trainer.batch is None and may_act:
        for taken, batch in _take(server, trainer.step + 1, rules, size):
            yield taken, checkpoint, replace(trainer, batch=batch)
    if trainer.batch is None and (not may_act or _is_gap(server, trainer.step + 1)):
        yield server, checkpoint, None  # it is told so, and ends
    if trainer.batch is not None:
        if trainer.batch & trainer.seen:
            raise Twice(f"step {trainer.step + 1} has {sorted(trainer.batch & trainer.seen)} again")
        trained = replace(
            trainer, step=trainer.step + 1, seen=trainer.seen | trainer.batch, batch=None
        )
        yield server, checkpoint, trained
    if trainer.batch is None and trainer.step != checkpoint[0] and may_act:
        yield server, (trainer.step, trainer.seen), trainer
    last = checkpoint[0] if rules.commit_after_checkpoint else trainer.step
    if trainer.batch is None and may_act and server.committed < last <= server.taken:
        kept = tuple((step, batch) for step, batch in server.batches if step > last)
        yield replace(server, committed=last, batches=kept), checkpoint, trainer


def _take(server: Server, step: int, rules: Rules, size: Size) -> Iterator[tuple[Server, Groups]]:
    recorded = dict(server.batches).get(step)
    if rules.recorded and recorded is not None:
        yield server, recorded
        return
    if rules.recorded and rules.refuses_gap and _is_gap(server, step):
        return
    batch = frozenset(
        g for task in (0, 1) for g in sorted(g for g in server.ready if g[0] == task)[: size.batch]
    )
    if len(batch) == 2 * size.batch:
        record = (*server.batches, (step, batch)) if rules.recorded else ()
        yield replace(server, ready=server.ready - batch, batches=record, taken=step), batch


def _is_gap(server: Server, step: int) -> bool:
    """Whether a step is neither recorded nor the next one."""
    return step not in dict(server.batches) and (
        step != server.taken + 1 or step <= server.committed
    )


def _open(state: State, rules: Rules, zombie: bool) -> State:
    step, seen = state.checkpoint
    # the smallest that nobody holds: names do not matter, and there must not be more and more of
    # them
    held = {state.server.nonce, state.disk.nonce, *(trainer.nonce for trainer in state.trainers)}
    nonce = next(number for number in count(1) if number not in held)
    server = replace(state.server, nonce=nonce)
    if rules.reasserts:
        # of batches that this history has not seen, those after a gap dissolve: their groups are
        # ready again
        ready = server.ready
        batches = server.batches
        known = max(server.taken, step)
        for number, batch in batches:
            if number > step and batch & seen:
                ready |= batch - seen
                batches = tuple(pair for pair in batches if pair[0] < number)
                known = number - 1
        server = replace(server, ready=ready - seen, batches=batches, taken=known)
    trainer = Trainer(nonce, step, seen)
    trainers = tuple(sorted((*state.trainers, trainer), key=_key))
    return replace(
        state, server=server, disk=server, trainers=trainers, zombies=state.zombies + zombie
    )


def _lost(state: State, rules: Rules) -> Iterator[Server]:
    """The server as it was when it last reached its disk; with two shards, the pool of one task,
    and nothing else.
    """
    yield state.disk
    for task in () if rules.one_log else (0, 1):
        old = {group for group in state.disk.ready if group[0] == task}
        yield replace(
            state.server, ready=frozenset(old | {g for g in state.server.ready if g[0] != task})
        )


def search(rules: Rules, size: Size) -> tuple[int, str]:
    """(states, what failed or ""), breadth first: what is found is a shortest way to it.

    "stuck": a state from which no way leads to weights that have seen every group.
    """
    every: Groups = frozenset((task, number) for task in (0, 1) for number in range(size.groups))
    server = Server(every)
    start = State(server, server, (0, frozenset()), ())
    seen = {start}
    queue = deque([start])
    before = defaultdict[State, list[State]](list)
    while queue:
        state = queue.popleft()
        if problem := _missing(state, every):
            return len(seen), problem
        try:
            found = set(moves(state, rules, size))
        except Twice as error:
            return len(seen), f"twice: {error}"
        for after in found:
            before[after].append(state)
        queue.extend(found - seen)
        seen |= found
    return len(seen), _stuck(seen, before, every)


def _stuck(states: set[State], before: Mapping[State, list[State]], every: Groups) -> str:
    """Walk back from all states that are an end; who is not met has no way there."""
    reached = {state for state in states if state.checkpoint[1] == every}
    queue = deque(reached)
    while queue:
        new = [state for state in before.get(queue.popleft(), ()) if state not in reached]
        reached.update(new)
        queue.extend(new)
    left = len(states) - len(reached)
    return f"stuck: {left} states" if left else ""


def _missing(state: State, every: Groups) -> str:
    """A group that a restart from the checkpoint could neither find nor has seen."""
    step, seen = state.checkpoint
    held = frozenset(g for number, batch in state.server.batches if number > step for g in batch)
    lost = every - state.server.ready - held - seen
    return f"lost: {sorted(lost)}" if lost else ""
