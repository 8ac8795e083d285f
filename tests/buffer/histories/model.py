"""What must be so: a plain Python model of a run that knows where every group must be. It talks to
no server.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from buffer.control.control import Mode
from buffer.ids import LANES
from buffer.limits import Straggler
from buffer.manifest import Manifest
from buffer.wire.rollout import PolicyVersion
from buffer.wire.staleness import next_step, staleness
from tests.buffer.scene import FIRST

TASKS = ("math", "code")
WORKERS = ("w0", "w1")
THRESHOLD = 2
MAX_TRIES = 2
TAIL_TRIES = 2
STAGES = (
    "waiting", "running", "completed", "aborted", "expired", "taken", "archived", "dead",
    "filtered", "dropped", "skipped",
)  # fmt: skip
LEASE_MS = 1_000_000
"""None runs out by itself, however long a machine takes for a history."""
TIMELESS = float("inf")
ALL_LANES = frozenset(("eval", "resume", "fresh"))


@dataclass
class Group:
    """What the model knows of one group. `made_by`: the weights of its tokens that count."""

    gid: str
    stage: str = "waiting"
    lane: str = "fresh"
    token: str = ""
    owner: str = ""
    result: str = "init"
    tries: int = 0
    best: int = 0
    """the most tokens that it had when turns of it were kept in a new claim"""
    aborts: int = 0
    released: str = ""
    """the token of the claim that was released last, unless it was requeued since"""
    arrival: int = 0
    made_by: list[PolicyVersion] = field(default_factory=list)
    prompt_bytes: int = 0
    result_bytes: int = 0
    kept_in: int = 0
    """the archived batch that still has its bytes"""
    unstamped: tuple[str, int | None] = ("", None)
    """a result whose weights no record tells, and its version: it came back after a loss, and every
    fork counts
    """

    @property
    def stamps(self) -> list[PolicyVersion]:
        """What its age is counted from."""
        token, version = self.unstamped
        if self.result != token:
            return self.made_by
        return [] if version is None else [PolicyVersion("nobody-knows", version)]

    @property
    def task(self) -> str:
        return self.gid.rpartition("-")[0]


@dataclass
class Task:
    cursor: int = 0
    consumed: int = 0
    arrivals: int = 0


class Model:
    """The groups of a run, its steps and forks, and the arithmetic of the rules."""

    def __init__(self, on_straggler: Straggler, order: str, tokens: int | None) -> None:
        self.on_straggler = on_straggler
        self.order = order
        self.tokens = tokens
        self.groups: dict[str, Group] = {}
        self.tasks = {name: Task() for name in TASKS}
        self.forks: list[tuple[str, int]] = []
        self.batches: dict[int, Manifest] = {}
        self.leaving: dict[int, list[str]] = {}
        self.taken = self.keep = self.committed = 0
        self.awaits = 0
        """the batch for whose missing groups the trainer waits"""
        self.weights = FIRST
        self.threshold = THRESHOLD
        self.max_tries = MAX_TRIES
        self.low = 0
        self.high = 0
        self.open_lanes = {"operator": ALL_LANES, "trainer": ALL_LANES}
        self.modes = {"operator": Mode.RUN, "trainer": Mode.RUN}

    @property
    def lanes(self) -> frozenset[str]:
        """The lanes that both who may pause leave open (I10)."""
        return self.open_lanes["operator"] & self.open_lanes["trainer"]

    @property
    def mode(self) -> Mode:
        """The stricter one of the two (I10)."""
        return max(self.modes.values(), key=[Mode.RUN, Mode.KEEP, Mode.DRAIN, Mode.ABORT].index)

    def refusal(self, lane: str) -> str:
        """Why nothing may start: fresh prompts do below the low mark, what was begun below the high
        one (I12).
        """
        if lane not in self.lanes:
            return "CLOSED"
        return "FULL" if self.is_full(lane) and self.will_free() else ""

    def is_full(self, lane: str) -> bool:
        return 0 < (self.low if lane == "fresh" else self.high) <= self.held()

    def will_free(self) -> bool:
        """Whether there is something to wait for: work, or batches that a checkpoint frees. Else a
        little starts.
        """
        return bool(self.at("running")) or self.taken > self.freed

    def granted(self, limit: int) -> list[str]:
        """The lanes of what a claim gets, in order. However full it is, one group is given where
        nothing else moves.
        """
        lanes: list[str] = []
        for lane in (lane for lane in LANES if lane in self.lanes):
            count = sum(group.lane == lane for group in self.at("waiting"))
            if self.is_full(lane):
                count = 0 if lanes or self.will_free() else min(count, 1)
            lanes += [lane] * count
        return lanes[:limit]

    def held(self) -> int:
        return sum(map(self.held_bytes, self.groups.values()))

    def at(self, stage: str, task: str | None = None) -> list[Group]:
        return [g for g in self.groups.values() if g.stage == stage and task in (None, g.task)]

    def version(self, group: Group) -> float:
        """M as it counts: no later than any fork after the lineage that made the tokens."""
        return min((self.living(made) for made in group.stamps), default=TIMELESS)

    def score(self, group: Group) -> float:
        """The version that decides when it expires: its own, or that of its last tokens, if these
        expire earlier.
        """
        if self.tokens is None or not group.stamps:
            return self.version(group)
        lineage = group.stamps[-1].lineage
        last = max(self.living(made) for made in group.stamps if made.lineage == lineage)
        return min(self.version(group), last - (self.threshold - self.tokens))

    def mask(self, group: Group, step: int) -> list[int]:
        """Two tokens of each weights: which of them `step` trains."""
        limit = float("inf") if self.tokens is None else self.tokens
        return [
            int(staleness(step, self.living(made)) < limit)
            for made in group.made_by
            for _ in range(2)
        ]

    def living(self, made: PolicyVersion) -> int:
        names = [name for name, _ in self.forks]
        later = self.forks[names.index(made.lineage) + 1 :] if made.lineage in names else self.forks
        return min([made.version, *(step for _, step in later)])

    def pooled(self, stage: str, task: str) -> list[Group]:
        return sorted(self.at(stage, task), key=lambda g: (self.score(g), g.arrival))

    def fresh(self, task: str) -> list[Group]:
        """The completed groups that the next step may use, in order."""
        return self.ready(task, self.taken + 1)

    @property
    def cut(self) -> int:
        """The oldest version that the step may use which the trainer waits for (I8)."""
        return next_step(self.taken, self.awaits) - self.threshold

    def ready(self, task: str, step: int, threshold: int = 0) -> list[Group]:
        """The completed groups that `step` may use, in the order of the run's policy; by the
        threshold of then.
        """
        fresh = [
            g
            for g in self.pooled("completed", task)
            if self.score(g) >= step - (threshold or self.threshold)
        ]
        if self.order == "fifo":
            fresh.sort(key=lambda g: g.arrival)
        return fresh

    def room(self, task: str, target: int) -> int:
        begun = [g for stage in ("waiting", "running") for g in self.at(stage, task)]
        ready = [g for g in self.at("completed", task) if self.score(g) >= self.cut]
        busy = len([g for g in begun if not self.is_expiring(g)]) + len(ready)
        return max(0, target - self.tasks[task].consumed - busy)

    def arrive(self, group: Group) -> None:
        self.tasks[group.task].arrivals += 1
        group.arrival = self.tasks[group.task].arrivals

    def take_back(self, group: Group) -> None:
        """Its lease is lost: a try is used up, unless it has grown."""
        if group.result.startswith(f"{group.token}-turns") and len(group.made_by) > group.best:
            group.tries = 0
        self.wait_or_die(group)

    def wait_or_die(self, group: Group) -> None:
        """A try was used up."""
        alive = group.tries < self.max_tries
        group.stage, group.lane, group.token = "waiting" if alive else "dead", "resume", ""

    def expire(self, *tasks: str) -> int:
        """What the next step may not use starts again, or is dropped; how many groups."""
        pooled = [
            g for task in tasks for stage in ("completed", "aborted") for g in self.at(stage, task)
        ]
        return self._expire([group for group in pooled if self.score(group) < self.cut])

    def expire_waiting(self) -> int:
        """Groups in the queue whose tokens became too old start again, or are dropped."""
        old = [group for group in self.at("waiting") if self.is_expiring(group)]
        old.sort(key=lambda group: (self.version(group), group.gid))
        if self.on_straggler == "retry":
            for group in old:
                self.arrive(group)
        return self._expire(old)

    def is_expiring(self, group: Group) -> bool:
        """Whether the next step may not use a group, whatever is added to the tokens that it has.

        What is added has newer tokens, so that none expires by its last ones.
        """
        return bool(group.made_by) and self.version(group) < self.cut

    def awaits_stragglers(self, *tasks: str) -> bool:
        """Whether a take waits for groups that could serve no later step."""
        cut = self.taken + 1 - self.threshold
        return self.on_straggler == "wait" and any(
            group.made_by and self.version(group) == cut
            for task in tasks
            if self.at("running", task)
            for stage in ("waiting", "running")
            for group in self.at(stage, task)
        )

    def _expire(self, old: list[Group]) -> int:
        for group in old:
            group.stage = "expired" if self.on_straggler == "retry" else "dropped"
            group.made_by, group.result = [], "init"
        return len(old)

    def readable(self, group: Group) -> bool:
        return group.stage not in ("archived", "filtered", "dropped", "skipped")

    def held_bytes(self, group: Group) -> int:
        """I12: the prompt until the group ends, and the result until it ends or starts again from
        its prompt.
        """
        if not self.readable(group):
            return group.result_bytes if group.kept_in else 0
        return group.prompt_bytes + (0 if group.result == "init" else group.result_bytes)

    @property
    def freed(self) -> int:
        """Batches up to this one are archived as a whole; those that are `leaving` are about to be."""
        return min(self.leaving, default=self.keep + 1) - 1

    def archive_one(self) -> None:
        """One slice of a commit."""
        step = min(self.leaving)
        if self.leaving[step]:
            group = self.groups[self.leaving[step].pop(0)]
            group.stage = "archived"
            group.kept_in = step
        if not self.leaving[step]:
            del self.leaving[step]

    def forget(self) -> None:
        """The bytes of batches that are archived as a whole are freed."""
        for group in self.groups.values():
            if group.kept_in <= self.freed:
                group.kept_in = 0

    def some_group(self, which: int) -> Group | None:
        groups = list(self.groups.values())
        return groups[which % len(groups)] if groups else None
