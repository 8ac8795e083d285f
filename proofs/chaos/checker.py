"""Decides from a history alone whether anything was lost, doubled, changed, stale, or handed in by
a zombie.

It shares no code with the queue: what a script answered is read here a second time. Sure is only
what was acknowledged: a call without an answer may or may not have happened. After the server was
made to lose data (`losses`), what was acknowledged before counts as such, too: it may be gone, and
must be done again, but never trained twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from proofs.chaos.contents import changes, content_of, differences
from proofs.chaos.figures import figures
from proofs.chaos.history import CLAIMED, Event
from proofs.chaos.lost_results import lost_results
from proofs.chaos.token_account import faults

Span = tuple[float, float]
"""(begin, end)"""

Fork = tuple[float, str, int]
"""(time, lineage, the step that it forks from)"""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the run promised. `threshold`: the first staleness, in steps, that is too old."""

    threshold: int
    rows: int
    answer_of: Any
    """row → the ground truth that its prompt has"""
    surely_fresh: int = 0
    """so many steps after its claim a result cannot be too old"""
    prompt_of: Any = None
    """gid → digest of the prompt that it was drawn with"""
    durable: bool = False
    """replicas are waited for: a failover loses no batch, and no result that was accepted"""


@dataclass(repr=False)
class Verdict:
    """`problems` by kind; a run is clean where there is none."""

    problems: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return not any(self.problems.values())

    def __repr__(self) -> str:
        return "; ".join(
            f"{kind}: {len(texts)}, first {texts[0]}"
            for kind, texts in self.problems.items()
            if texts
        )


class Checker:
    """One history, judged by `rules`."""

    def __init__(self, events: Sequence[Event], rules: Rules) -> None:
        self.events = events
        self.rules = rules
        self.by_op: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            self.by_op[event["op"]].append(event)

    def check(self) -> Verdict:
        """Every promise."""
        verdict = Verdict()
        checks = {
            "lost or doubled": self._account,
            "miscounted": self._counters,
            "tokens": lambda: faults(
                self.final.get("tokens", {}), self.by_op, lost_data=bool(self.losses)
            ),
            "trained twice": self._trained_twice,
            "not what was trained": self._weights,
            "batch changed": self._redelivery,
            "not what was sampled": lambda: differences(self.by_op, self.rules.prompt_of),
            "changed while held": lambda: changes(self.by_op),
            "too old": self._staleness,
            "result lost": lambda: self.results_lost if self.rules.durable else [],
            "zombie": self._zombies,
            "order": self._order,
            "stuck": self._liveness,
        }
        for kind, look in checks.items():
            verdict.problems[kind] = list(look())
        verdict.figures = figures(self, verdict.problems)
        return verdict

    # -- what the history holds ----------------------------------------------

    def ok(self, op: str) -> list[Event]:
        """Calls that were answered OK."""
        return [
            event
            for event in self.by_op[op]
            if event["phase"] == "ok" and event["reply"][0] == "OK"
        ]

    @cached_property
    def losses(self) -> list[Span]:
        """When servers were made to lose what they had acknowledged."""
        return [
            (event.get("since", event["t"]), event["t"])
            for event in [*self.by_op["fault"], *self.by_op["loss"]]
            if event["op"] == "loss" or event.get("loses")
        ]

    @cached_property
    def lost_until(self) -> float:
        """After this nothing acknowledged was lost."""
        return max((end for _, end in self.losses), default=0.0)

    @cached_property
    def surviving(self) -> list[Event]:
        """The train steps that are in the last weights, found by walking back from the newest
        checkpoint's chain.
        """
        ends = self.by_op["finished"] or self.by_op["checkpoint"]
        trained = {event["after"]: event for event in self.by_op["trained"]}
        chain, steps = (ends[-1]["chain"] if ends else ""), []
        while chain in trained:
            steps.append(trained[chain])
            chain = trained[chain]["before"]
        return steps[::-1]

    @cached_property
    def final(self) -> Event:
        return (
            self.by_op["final"][-1]
            if self.by_op["final"]
            else {"stages": {}, "cursors": {}, "ledger": {}}
        )

    @cached_property
    def forks(self) -> list[Fork]:
        return [(event["t"], event["lineage"], event["step"]) for event in self.by_op["opened"]]

    @cached_property
    def entered(self) -> set[str]:
        return {
            f"{event['args']['task']}-{draw:010d}"
            for event in self.ok("enqueue")
            for draw in range(int(event["args"]["cursor"]), int(event["reply"][2]))
        }

    # -- the promises --------------------------------------------------------

    def _account(self) -> Iterator[str]:
        """What was acknowledged is in exactly one stage; archived and taken is what the weights
        have seen.
        """
        stages: dict[str, list[str]] = self.final["stages"]
        below = {
            f"{task}-{draw:010d}"
            for task, cursor in self.final["cursors"].items()
            for draw in range(cursor)
        }
        # a server that lost data forgets draws, and the same ones come again: only what it passed
        # since counts
        expected = below if self.losses else below | self.entered
        yield from (f"{gid} is nowhere" for gid in sorted(expected - stages.keys()))
        yield from (
            f"{gid} is {' and '.join(found)}"
            for gid, found in sorted(stages.items())
            if len(found) > 1
        )
        trained = {gid for event in self.surviving for gid in event["gids"]}
        for gid, found in sorted(stages.items()):
            if found == ["archived"] and gid not in trained:
                yield f"{gid} is archived, but no surviving step has trained it"
            if found[0] not in ("archived", "taken", "dead") and gid in trained:
                yield f"{gid} is trained, but {found[0]}"
        yield from (
            f"{gid} is dropped, filtered or skipped, which nobody asked for"
            for gid in self._put_away()
        )

    def _counters(self) -> Iterator[str]:
        """Entered = waiting + running + pooled + taken + archived + dead + filtered + dropped
        + skipped, as the run counts them and as they are found.
        """
        stages: dict[str, list[str]] = self.final["stages"]
        for task, counted in self.final.get("counters", {}).items():
            found = Counter(where[0] for gid, where in stages.items() if gid.startswith(f"{task}-"))
            for stage in ("running", "taken", "archived", "dead", "filtered", "dropped", "skipped"):
                if counted[stage] != found[stage]:
                    yield f"{task}: {counted[stage]} counted as {stage}, {found[stage]} found"
            entered = counted["enqueued"] + counted["put"] + counted["imported"]
            if entered != (total := sum(gid.startswith(f"{task}-") for gid in stages)):
                yield f"{task}: {entered} counted as entered, {total} found"
            if counted["enqueued"] != counted["cursor"] + counted["reentered"]:
                yield f"{task}: {counted['enqueued']} counted as enqueued, the cursor is at {counted['cursor']}"

    def _put_away(self) -> Iterator[str]:
        asked = {
            event["args"]["gid"]
            for event in self.by_op["submit"]
            if event["args"].get("status") == "filtered"
        }
        for gid, found in self.final["stages"].items():
            if found[0] in ("dropped", "filtered", "skipped") and gid not in asked:
                yield gid

    def _trained_twice(self) -> Iterator[str]:
        seen: dict[str, int] = {}
        for event in self.surviving:
            for gid in event["gids"]:
                if gid in seen:
                    yield f"{gid} in steps {seen[gid]} and {event['step']}"
                seen[gid] = event["step"]

    def _weights(self) -> Iterator[str]:
        """The newest checkpoint comes from nothing but steps 1, 2, 3 … that were delivered."""
        steps = [event["step"] for event in self.surviving]
        if steps != list(range(1, len(steps) + 1)):
            yield f"the last weights come from steps {steps[:5]}…{steps[-5:]}"
        ends = self.by_op["finished"] or self.by_op["checkpoint"]
        if ends and ends[-1]["step"] != len(steps):
            yield f"the last checkpoint says step {ends[-1]['step']}, its chain has {len(steps)}"

    def _redelivery(self) -> Iterator[str]:
        """A step comes again as it was, unless a group was quarantined, or the server lost it."""
        last: dict[int, Event] = {}
        for event in self.by_op["delivered"]:
            before = last.get(event["step"])
            if (
                before
                and content_of(before) != content_of(event)
                and not self._may_change(before, event)
            ):
                yield f"step {event['step']} of {event['lineage']} is not what {before['lineage']} was given"
            last[event["step"]] = event

    def _may_change(self, before: Event, event: Event) -> bool:
        between = (before["t"], event["t"])
        moves = [*self.ok("quarantine"), *self.ok("refill")]
        changed = [e["t"] for e in moves if int(e["args"]["step"]) == event["step"]]
        if any(between[0] <= t <= between[1] for t in changed):
            return True
        # a take is durable
        return not self.rules.durable and any(
            start <= between[1] and end >= between[0] for start, end in self.losses
        )

    @cached_property
    def results_lost(self) -> list[str]:
        """See `lost_results`."""
        return lost_results(self.events, self.rules.surely_fresh)

    def _staleness(self) -> Iterator[str]:
        """At the first delivery of a batch no group is too old; a recorded one is exempt."""
        known: set[tuple[int, tuple[Any, ...]]] = set()
        for event in self.by_op["delivered"]:
            if (event["step"], content_of(event)) in known:
                continue
            known.add((event["step"], content_of(event)))
            for group in event["groups"]:
                age = event["step"] - self._version(group, event["t"]) - 1
                if age >= self.rules.threshold:
                    yield f"{group['gid']} in step {event['step']} has staleness {age:.0f}"

    def _version(self, group: Any, now: float) -> float:
        """The oldest version in a group, where weights that a trainer forked away from count as the
        fork.
        """
        return min(
            (self._living(lineage, version, now) for lineage, version in group["made_by"]),
            default=float("inf"),
        )

    def _living(self, lineage: str, version: int, now: float) -> int:
        opened = [t for t, name, _ in self.forks if name == lineage]
        since = opened[0] if opened else -1.0
        return min(
            [
                version,
                *(step for t, name, step in self.forks if since < t <= now and name != lineage),
            ]
        )

    def _zombies(self) -> Iterator[str]:
        """What was delivered was handed in by the claim whose token it has, those bytes, and was
        not refused before.
        """
        asked: dict[tuple[str, str], set[str]] = defaultdict(set)
        first: dict[tuple[str, str], float] = {}
        refused: dict[tuple[str, str], float] = {}
        for event in self.by_op["submit"]:
            key = (event["args"]["gid"], event["args"]["token"])
            asked[key].add(event["args"]["crc"])
            first.setdefault(key, event["t"])
            if event["phase"] == "ok" and event["reply"][0] == "FENCED":
                refused.setdefault(key, event["t"])
        delivered: dict[tuple[str, str], float] = {}
        for event in self.by_op["delivered"]:
            for group in event["groups"]:
                key = (group["gid"], group["token"])
                delivered.setdefault(key, event["t"])
                if group["crc"] not in asked[key]:
                    yield f"{key[0]} of token {key[1][:8]} was delivered, but nobody handed those bytes in"
        for key, at in delivered.items():
            if refused.get(key, at) < at:
                yield f"{key[0]} of token {key[1][:8]} was refused, and delivered later"
        yield from self._overtaken(first)

    def _overtaken(self, first: dict[tuple[str, str], float]) -> Iterator[str]:
        """A result is accepted although another claim of the group was answered before it was
        handed in.
        """
        claimed: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for event in self.by_op["claim"]:
            for gid in event["reply"][CLAIMED]:
                claimed[gid].append((event["t"], event["args"]["token"]))
        for event in self.ok("submit"):
            gid = event["args"]["gid"]
            token = event["args"]["token"]
            mine = [t for t, other in claimed[gid] if other == token]
            later = [
                t
                for t, other in claimed[gid]
                if other != token and mine and mine[0] < t < first[gid, token]
            ]
            if later and mine[0] > self.lost_until:
                yield f"{gid}: token {token[:8]} was accepted after a later claim"

    def _order(self) -> Iterator[str]:
        """Draws enter in turn, each once; and a draw has the row of the data set that is its."""
        for task, cursor in self.final["cursors"].items():
            passed = Counter(int(gid[-10:]) for gid in self._draws(task))
            yield from (
                f"draw {d} of {task} was enqueued {n} times" for d, n in passed.items() if n > 1
            )
            maybe = self._perhaps(task)
            missing = [draw for draw in range(cursor) if not passed[draw] and draw not in maybe]
            yield from (f"draw {draw} of {task} was passed over" for draw in missing)
        for event in self.by_op["delivered"]:
            for group in event["groups"]:
                row = int(group["gid"][-10:]) % self.rules.rows
                if (group["row"], group["truth"]) != (row, self.rules.answer_of(row)):
                    yield f"{group['gid']} has row {group['row']}, not {row}"

    def _draws(self, task: str) -> Iterator[str]:
        """Gids of acknowledged enqueues since the last loss, one for each time."""
        for event in self.ok("enqueue"):
            if event["args"]["task"] == task and event["t"] > self.lost_until:
                for draw in range(int(event["args"]["cursor"]), int(event["reply"][2])):
                    yield f"{task}-{draw:010d}"

    def _perhaps(self, task: str) -> set[int]:
        """Draws that an enqueue without an answer may have passed: 64 at most each. After a loss,
        all before it.
        """
        answered = {
            (e["who"], e["pid"], e["call"]) for e in self.by_op["enqueue"] if e["phase"] == "ok"
        }
        calls = [
            e for e in self.by_op["enqueue"] if e["phase"] == "call" and e["args"]["task"] == task
        ]
        lost = [
            int(e["args"]["cursor"])
            for e in calls
            if (e["who"], e["pid"], e["call"]) not in answered
        ]
        before = [int(e["args"]["cursor"]) for e in calls if e["t"] <= self.lost_until]
        return {draw for start in [*lost, *before] for draw in range(start, start + 64)}

    def _liveness(self) -> Iterator[str]:
        calm = [event["t"] for event in self.by_op["calm"]]
        if not calm:
            return
        if not any(event["t"] > calm[-1] for event in self.by_op["delivered"]):
            yield "no batch was delivered after the last fault"
        if not self.by_op["finished"]:
            yield "the run did not reach its end"
