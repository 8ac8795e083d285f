"""Model a run with discrete events, as if the queue between workers and trainer cost nothing.

    target(M) - consumed - open - ready ──▶ waiting ──▶ running ──▶ ready ──B──▶ trainer ──▶ M
                                               ▲            └── interrupted ──┐    └── too old:
                                               └──────────────────────────────┘        wasted

The rules are the pipeline's own, but only tokens, train steps and loading weights take time, and a
waiting group goes to the worker with the most free slots. Pure: equal inputs give equal outcomes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from buffer.wire.staleness import staleness
from producer_workers.simulation.setting import Lengths, Outcome, Setting

REDRAWN = 1 << 32
"""Added to the number of a draw whose group is retried: lengths of the same prompt, drawn again."""


@dataclass(slots=True, eq=False)
class _Group:
    """A group of a draw. `left`: tokens that each rollout has yet to make.

    `versions`: the weights under which each rollout began, or None. `made`: all sampled tokens,
    repeated ones included.
    """

    draw: int
    lengths: list[int]
    left: list[int] = field(init=False)
    versions: list[int | None] = field(init=False)
    made: int = 0
    unfinished: int = 0

    def __post_init__(self) -> None:
        self.left = list(self.lengths)
        self.versions = [None] * len(self.lengths)

    def has_begun(self) -> bool:
        return any(version is not None for version in self.versions)

    def version(self) -> int:
        """Return the version of the oldest rollout that has tokens."""
        return min(version for version in self.versions if version is not None)

    def interrupt(self, *, keep_tokens: bool) -> None:
        """Restart every unfinished rollout, or, with `keep_tokens`, those without a token."""
        for index, tokens in enumerate(self.left):
            if tokens and not keep_tokens:
                self.left[index] = self.lengths[index]
            if self.left[index] == self.lengths[index]:
                self.versions[index] = None


class _Sequence(NamedTuple):
    """A rollout in an engine, ordered by its end on the engines' clock."""

    due_s: float
    number: int
    started_s: float
    worker: int
    group: _Group
    member: int


def simulate(setting: Setting, lengths: Lengths, steps: int) -> Outcome:
    model = _Model(setting, lengths)
    while model.trained < steps:
        model.advance()
    return model.outcome()


@dataclass(slots=True)
class _Engines:
    """All workers. `clock_s` stands still while weights are loaded."""

    setting: Setting
    clock_s: float = 0.0
    busy_s: float = 0.0
    held_s: float = 0.0
    running: list[_Sequence] = field(init=False)
    room: NDArray[np.int64] = field(init=False)
    sequences: list[int] = field(init=False)
    queues: list[deque[tuple[_Group, int]]] = field(init=False)
    _free: int = field(init=False)
    _numbers: int = 0

    def __post_init__(self) -> None:
        self._empty()

    def _empty(self) -> None:
        workers = self.setting.workers
        self.running = []
        self.room = np.full(workers, self.setting.concurrency, dtype=np.int64)
        self._free = workers * self.setting.concurrency
        self.sequences = [self.setting.sequences] * workers
        self.queues = [deque() for _ in range(workers)]

    def has_room(self) -> bool:
        return self._free > 0

    def is_empty(self) -> bool:
        return self._free == self.setting.workers * self.setting.concurrency

    def groups(self) -> set[_Group]:
        """Return the groups that workers hold."""
        queued = (group for queue in self.queues for group, _ in queue)
        return {*(sequence.group for sequence in self.running), *queued}

    def pass_time(self, seconds: float) -> None:
        self.busy_s += len(self.running) * seconds
        self.held_s += (self.setting.workers * self.setting.concurrency - self._free) * seconds
        self.clock_s += seconds

    def start(self, group: _Group, version: int) -> None:
        """Give a group to the worker with the most free slots."""
        worker = int(self.room.argmax())
        self.room[worker] -= 1
        self._free -= 1
        todo = [index for index, tokens in enumerate(group.left) if tokens]
        group.unfinished = len(todo)
        self.queues[worker].extend((group, index) for index in todo)
        self._admit(worker, version)

    def _admit(self, worker: int, version: int) -> None:
        queue = self.queues[worker]
        while queue and self.sequences[worker]:
            group, index = queue.popleft()
            self.sequences[worker] -= 1
            self._numbers += 1
            if group.versions[index] is None:
                group.versions[index] = version
            due_s = self.clock_s + self.setting.seconds(group.left[index])
            heappush(
                self.running, _Sequence(due_s, self._numbers, self.clock_s, worker, group, index)
            )

    def finish_next(self, version: int) -> _Group | None:
        """End the next sequence; return its group if that was its last one."""
        _, _, _, worker, group, index = heappop(self.running)
        group.made = group.made + group.left[index]
        group.left[index] = 0
        group.unfinished -= 1
        self.sequences[worker] += 1
        if not group.unfinished:
            self.room[worker] += 1
            self._free += 1
        self._admit(worker, version)
        return None if group.unfinished else group

    def end(self, is_expiring: Callable[[_Group], bool], version: int) -> list[_Group]:
        """Take groups out of their workers, and return them."""
        left: list[_Sequence] = []
        ended: dict[_Group, int] = {}
        for sequence in self.running:
            if is_expiring(sequence.group):
                self._count_tokens(sequence)
                self.sequences[sequence.worker] += 1
                ended[sequence.group] = sequence.worker
            else:
                left.append(sequence)
        heapify(left)
        self.running = left
        for worker in set(ended.values()):
            waiting = (entry for entry in self.queues[worker] if entry[0] not in ended)
            self.queues[worker] = deque(waiting)
            groups = sum(at == worker for at in ended.values())
            self.room[worker] += groups
            self._free += groups
            self._admit(worker, version)
        return list(ended)

    def _count_tokens(self, sequence: _Sequence) -> None:
        group, index = sequence.group, sequence.member
        made = self.setting.tokens(self.clock_s - sequence.started_s)
        tokens = min(made, group.left[index] - 1)
        group.made += tokens
        group.left[index] -= tokens

    def abort_all(self, *, keep_tokens: bool) -> list[_Group]:
        """Take back every group in the order of its start, with what its rollouts keep."""
        for sequence in self.running:
            self._count_tokens(sequence)
        begun = sorted(self.running, key=lambda sequence: sequence.number)
        waiting = [group for queue in self.queues for group, _ in queue]
        groups = list(dict.fromkeys([*(sequence.group for sequence in begun), *waiting]))
        for group in groups:
            group.interrupt(keep_tokens=keep_tokens)
        self._empty()
        return groups


class _Model:
    """The state of the run. `taken` and `trained` are the newest such train steps."""

    def __init__(self, setting: Setting, lengths: Lengths) -> None:
        self._setting = setting
        self._lengths = lengths
        self._engines = _Engines(setting)
        self._now_s = 0.0
        self._wake_s: float | None = None  # the end of the train step, or of the loading
        self._mode = "waiting"  # the trainer is waiting, training, draining or loading
        self._version = 0
        self._drawn = 0
        self._open = 0  # groups that wait or run
        self._arrivals = 0
        self.taken = 0
        self.trained = 0
        self._fresh: deque[_Group] = deque()
        self._resumed: deque[_Group] = deque()
        self._ready: list[tuple[int, int, _Group]] = []
        self._ages: Counter[int] = Counter()
        self._trained_tokens = 0
        self._wasted_tokens = 0
        self._trained: list[int] = []  # tokens of each response
        self._expired: list[int] = []
        self._straggling = (0, 0)  # steps taken and groups finished when a step began to wait

    def advance(self) -> None:
        """Advance to the next end of a sequence, of a train step or of a loading."""
        self._start_groups()
        self._take()
        engines = self._engines
        loading = self._mode == "loading"
        due_s = [] if self._wake_s is None else [self._wake_s]
        if engines.running and not loading:
            due_s.append(self._now_s + engines.running[0].due_s - engines.clock_s)
        now_s = min(due_s)  # never empty: the rules always leave one of the two to wait for
        if not loading:
            engines.pass_time(now_s - self._now_s)
        self._now_s = now_s
        if now_s == self._wake_s:
            self._wake()
        else:
            if group := engines.finish_next(self._version):
                self._open -= 1
                self._arrivals += 1
                heappush(self._ready, (group.version(), self._arrivals, group))
                self._expire()
            if self._mode == "draining" and engines.is_empty():
                self._load()

    # -- workers

    def _start_groups(self) -> None:
        consumed = self.taken * self._setting.batch_size
        room = self._setting.target(self._version) - consumed - self._open - len(self._ready)
        for _ in range(room):
            self._fresh.append(_Group(self._drawn, self._lengths(self._drawn)))
            self._drawn += 1
        self._open += max(0, room)
        if self._mode in ("draining", "loading"):
            return
        while (self._resumed or self._fresh) and self._engines.has_room():
            queue = self._resumed or self._fresh
            self._engines.start(queue.popleft(), self._version)

    def _is_too_old(self, version: int) -> bool:
        return staleness(self.taken + 1, version) >= self._setting.stale_threshold

    def _expire(self) -> None:
        while self._ready and self._is_too_old(self._ready[0][0]):
            self._drop(heappop(self._ready)[2])

    def _drop(self, group: _Group) -> None:
        """Count a group that is too old; one that is retried draws its lengths again."""
        self._wasted_tokens += group.made
        self._expired += group.lengths
        if self._setting.on_straggler == "retry":
            self._open += 1
            draw = group.draw + REDRAWN
            self._resumed.append(_Group(draw, self._lengths(draw)))

    # -- trainer

    def _take(self) -> None:
        if self._mode != "waiting" or len(self._ready) < self._setting.batch_size:
            return
        if self._setting.on_straggler == "wait" and self._has_straggler():
            self._straggling = self.taken, self._arrivals
            return
        self.taken += 1
        for _ in range(self._setting.batch_size):
            version, _, group = heappop(self._ready)
            self._ages[staleness(self.taken, version)] += 1
            self._trained += group.lengths
            self._trained_tokens += sum(group.lengths)
            self._wasted_tokens += group.made - sum(group.lengths)
        self._expire()

        def is_expiring(group: _Group) -> bool:
            """Return whether a group runs or waits, and can serve no train step any more."""
            return group.has_begun() and self._is_too_old(group.version())

        expiring = self._engines.end(is_expiring, self._version)
        expiring += filter(is_expiring, self._resumed)
        self._resumed = deque(group for group in self._resumed if not is_expiring(group))
        self._open -= len(expiring)
        for group in expiring:
            self._drop(group)
        self._mode = "training"
        self._wake_s = self._now_s + self._setting.step_s

    def _has_straggler(self) -> bool:
        """Return whether a group runs whose last train step is the next one."""
        if self._straggling == (self.taken, self._arrivals):
            return True  # none has finished since
        last = self.taken + 2 - self._setting.stale_threshold
        return any(
            staleness(last, group.version()) >= 0
            for group in self._engines.groups()
            if group.has_begun()
        )

    def _wake(self) -> None:
        self._wake_s = None
        if self._mode == "loading":
            self._version = self.trained
            self._mode = "waiting"
            return
        self.trained = self.taken
        if self.trained % self._setting.sync_weights_interval:
            self._mode = "waiting"
        elif self._setting.interruption == "drain" and not self._engines.is_empty():
            self._mode = "draining"
        else:
            self._load()

    def _load(self) -> None:
        if self._setting.interruption in ("abort", "partial"):
            keep_tokens = self._setting.interruption == "partial"
            self._resumed.extendleft(reversed(self._engines.abort_all(keep_tokens=keep_tokens)))
        self._mode = "loading"
        self._wake_s = self._now_s + self._setting.sync_s

    def outcome(self) -> Outcome:
        setting = self._setting
        return Outcome(
            seconds=self._now_s,
            steps=self.trained,
            groups=self.trained * setting.batch_size,
            trained_tokens=self._trained_tokens,
            wasted_tokens=self._wasted_tokens,
            busy_s=self._engines.busy_s,
            capacity_s=setting.workers * setting.sequences * self._now_s,
            held=self._engines.held_s / (setting.workers * setting.concurrency * self._now_s),
            trainer_busy_s=self.trained * setting.step_s,
            staleness=dict(sorted(self._ages.items())),
            trained_lengths=self._trained,
            expired_lengths=self._expired,
        )
