"""Finish a run from any state without further faults: nothing is lost, and nothing stands still."""

from __future__ import annotations

from dataclasses import replace

from buffer.manifest import Manifest
from proofs.model_check.operations import Pending
from proofs.model_check.processes import Janitor, Operator, Process, Producer, Trainer, Worker
from proofs.model_check.state_invariants import find_stages, plain
from proofs.model_check.world import Budget, State, World

ROUNDS = 40
ENDED = {"taken", "archived", "filtered", "dropped", "skipped", "dead"}


def finish(world: World, state: State) -> None:
    """Start every process again, let time pass, and let each do all that it can, in turn.

    Raises AssertionError for a group that is not trained then, and has not ended in another way.
    """
    state = replace(state, late=(), budget=Budget(), processes=_all_kinds(state))
    for number in range(len(state.processes)):
        state = world.replace_process(state, number)
    for _ in range(ROUNDS):
        if _has_ended(state):
            return
        state = world.advance_clock(state, 0.45)
        for number in range(len(state.processes)):
            state = _do_all(world, state, number)
    stages = find_stages(state.image)
    raise AssertionError(f"the run does not finish: {stages}, {plain(state.image, b'control', {})}")


def _all_kinds(state: State) -> tuple[Process, ...]:
    # others, in place of those that a batch lacks
    lacking = sum(manifest.open_places.total() for manifest in _under_way(state))
    groups = max(1, len(find_stages(state.image)) + lacking)
    kinds = {type(process) for process in state.processes}
    janitor = Janitor(("reap", "refresh", "expire_waiting"))
    needed = (Producer(groups), Worker("w9"), Trainer(0), janitor)
    present = (*state.processes, *(one for one in needed if type(one) not in kinds))
    return tuple(_with_room(process, groups) for process in present)


def _under_way(state: State) -> list[Manifest]:
    """Return the batches that trainers have taken and not yet trained on."""
    trainers = [process for process in state.processes if isinstance(process, Trainer)]
    return [trainer.manifest for trainer in trainers if trainer.manifest]


def _with_room(process: Process, groups: int) -> Process:
    match process:
        case Trainer():
            return process._replace(steps=groups + 9)
        case Producer():
            return process._replace(groups=max(process.groups, groups), draws=1)
    return process


def _has_ended(state: State) -> bool:
    if any(manifest.open_places for manifest in _under_way(state)):
        return False
    stages = find_stages(state.image)
    groups = max(getattr(process, "groups", 0) for process in state.processes)
    found = [stage for (stage,) in stages.values()]
    # a trainer waits for a whole batch
    spare = min(process.batch for process in state.processes if isinstance(process, Trainer)) - 1
    left = [stage for stage in found if stage not in ENDED]
    return len(found) >= groups and left.count("pool") == len(left) <= spare


def _do_all(world: World, state: State, number: int) -> State:
    """Let a process carry out each operation that it may start, until none changes anything."""
    useless: set[tuple[str, ...]] = set()
    while True:
        name, state = world.new_name(state)
        process = state.processes[number]
        starts = [
            start
            for start in process.starts(lambda name=name: name)  # type: ignore[misc]
            if not start.costs and _kind(start.pending) not in useless
        ]
        if isinstance(process, Operator):
            # what was paused is continued
            starts = [start for start in starts if start.pending.args[0] == "run"]
        if not starts:
            return state
        before = state.image.numbers
        state = world.carry_out(state, number, starts[0])
        if state.image.numbers == before or starts[0].pending.name == "heartbeat":
            useless.add(_kind(starts[0].pending))


def _kind(pending: Pending) -> tuple[str, ...]:
    """Return the name of an operation, with the pool that it is about."""
    return (pending.name, *(str(arg) for arg in pending.args if arg in ("aborted", "expired")))
