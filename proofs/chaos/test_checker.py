"""The checker of `make chaos` must find what is planted into a history, and nothing in a good one."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from buffer.wire.rollout import VersionSpan
from proofs.chaos.checker import Checker, Rules, Verdict
from proofs.chaos.final_look import COUNTED
from proofs.chaos.history import Event
from proofs.chaos.lost_results import lost_results
from proofs.truth.witness import content, digest

BATCH = 2
STEPS = 4
THRESHOLD = 2
PROMPT = np.arange(3, dtype="<i4")
RULES = Rules(threshold=THRESHOLD, rows=3, answer_of=str, prompt_of=lambda _: digest(PROMPT))


class Story:
    """A good run of 4 steps with 2 groups each, and one group that still waits; the trainer died
    once, after step 2.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._time = 100.0
        self.enqueue(0, 9)
        self.open("l1", 0, "")
        for step in (1, 2):
            self.deliver(step, "l1", version=max(0, step - 1))
        self.note("checkpoint", step=1, chain="c1")
        self.open("l2", 1, "c1")
        self.deliver(2, "l2", version=1, again=True)
        for step in (3, 4):
            self.deliver(step, "l2", version=step - 1)
        self.note("calm")
        self.deliver(4, "l2", version=3, again=True)
        self.note("finished", step=4, chain="c4")
        stages = {gid(draw): ["archived"] for draw in range(BATCH * STEPS)} | {gid(8): ["waiting"]}
        counted = dict.fromkeys(COUNTED, 0) | {
            "archived": BATCH * STEPS,
            "enqueued": 9,
            "cursor": 9,
        }
        self.note("final", stages=stages, cursors={"t": 9}, ledger={}, counters={"t": counted})

    def note(self, op: str, **more: Any) -> Event:
        self._time += 1.0
        self.events.append({"t": self._time, "who": "client", "op": op, **more})
        return self.events[-1]

    def script(self, op: str, reply: list[Any], **args: Any) -> None:
        for phase, more in (("call", {}), ("ok", {"reply": reply})):
            self.note(op, phase=phase, pid=1, call=int(self._time), args=args, **more)
            self.events[-1]["call"] = len(
                [e for e in self.events if e["op"] == op and e["phase"] == "call"]
            )

    def enqueue(self, cursor: int, after: int) -> None:
        self.script("enqueue", ["OK", after - cursor, str(after)], task="t", cursor=cursor)

    def open(self, lineage: str, step: int, chain: str) -> None:
        self.note("opened", lineage=lineage, step=step, chain=chain)

    def deliver(self, step: int, lineage: str, *, version: int, again: bool = False) -> None:
        gids = [gid(draw) for draw in range(BATCH * (step - 1), BATCH * step)]
        for name in [] if again else gids:
            token = f"token-{name}"
            control = ["1", "run", "", "", "", ""]
            self.note(
                "claim", phase="ok", args={"token": token}, reply=["OK", *control, name, *[""] * 7]
            )
            self.script("submit", ["OK", "1"], gid=name, token=token, crc="c", status="completed")
        groups = [facts(name, lineage, version) for name in gids]
        for group in groups:
            (member,) = group["members"]
            made = [list(piece) for piece in member["pieces"]]
            self.note("made", gid=group["gid"], member=0, pieces=made, ended=True)
        self.note("delivered", step=step, lineage=lineage, groups=groups)
        chain = {"before": f"c{step - 1}" if step > 1 else "", "after": f"c{step}"}
        self.note("trained", step=step, gids=gids, **chain)

    def first(self, op: str, **wanted: Any) -> Event:
        return next(
            e
            for e in self.events
            if e["op"] == op and all(e.get(k) == v for k, v in wanted.items())
        )


Plant = Callable[[Story], object]


def gid(draw: int) -> str:
    return f"t-{draw:010d}"


def facts(name: str, lineage: str, version: int) -> dict[str, Any]:
    row = int(name[-10:]) % RULES.rows
    return {
        "gid": name, "token": f"token-{name}", "crc": "c", "digest": f"d-{name}",
        "row": row, "truth": str(row), "made_by": [[lineage, version]],
        "members": [member_of(name, VersionSpan(0, 2, version, lineage))],
    }  # fmt: skip


def member_of(name: str, span: VersionSpan) -> dict[str, Any]:
    """A rollout of two tokens."""
    ids = np.array([int(name[-10:]), 7], "<i4")
    columns = (ids, np.array([-0.5, -0.25], "<f4"), np.ones(2, "u1"))
    found = content(PROMPT, *columns, [span])
    return {"gid": name, "member": 0, "reward": found["score"], **found}


def judge(story: Story) -> Verdict:
    return Checker(story.events, RULES).check()


def test_a_good_history_is_clean() -> None:
    verdict = judge(Story())
    assert verdict.clean, verdict
    assert verdict.figures["groups_trained"] == 8
    assert verdict.figures["redelivered"] == 2


def final(story: Story) -> Event:
    return story.first("final")


def events_of(story: Story, op: str, step: int) -> list[Event]:
    return [event for event in story.events if event["op"] == op and event["step"] == step]


def stage(*found: str) -> Plant:
    """Let the last group be found in these stages."""
    return lambda story: final(story)["stages"].update({gid(8): list(found)})


def count(name: str) -> Plant:
    def miscount(story: Story) -> None:
        final(story)["counters"]["t"][name] += 1

    return miscount


def made_by(*weights: list[Any]) -> Plant:
    def age(story: Story) -> None:
        for event in events_of(story, "delivered", 4):
            event["groups"][0]["made_by"] = list(weights)

    return age


def group_of(step: int, **changes: Any) -> Plant:
    return lambda story: story.first("delivered", step=step)["groups"][0].update(changes)


def train_twice(story: Story) -> None:
    for event in events_of(story, "trained", 4):
        event["gids"][0] = gid(0)


def skip_a_step(story: Story) -> None:
    for event in events_of(story, "trained", 4):
        event["before"] = "c2"


def change_a_batch(story: Story) -> None:
    events_of(story, "delivered", 2)[1]["groups"][0]["digest"] = "other"


def accept_after_a_later_claim(story: Story) -> None:
    claim = deepcopy(story.first("claim"))
    claim["args"]["token"], claim["t"] = "another", claim["t"] + 0.5
    story.events.append(claim)


def pass_a_draw_over(story: Story) -> None:
    story.enqueue(10, 11)
    final(story)["cursors"]["t"] = 11
    final(story)["stages"] |= {gid(9): ["waiting"], gid(10): ["waiting"]}


def train_tokens_of_another_group(story: Story) -> None:
    groups = story.first("delivered", step=3)["groups"]
    groups[0]["members"][0]["pieces"] = groups[1]["members"][0]["pieces"]


def reward_by_another_number(story: Story) -> None:
    story.first("delivered", step=3)["groups"][0]["members"][0]["reward"] += 0.5


def overwrite_a_batch_that_is_held(story: Story) -> None:
    delivered = story.first("delivered", step=3)
    groups = [group | {"digest": "other"} for group in delivered["groups"]]
    story.note("held", step=3, lineage="l2", groups=groups)


PLANTED: dict[str, tuple[str, Plant]] = {
    "lost": ("lost or doubled", lambda story: final(story)["stages"].pop(gid(8))),
    "in two stages": ("lost or doubled", stage("waiting", "running")),
    "archived untrained": ("lost or doubled", stage("archived")),
    "dropped": ("lost or doubled", stage("dropped")),
    "wrong count": ("miscounted", count("archived")),
    "count of what never came": ("miscounted", count("imported")),
    "trained twice": ("trained twice", train_twice),
    "step left out": ("not what was trained", skip_a_step),
    "changed batch": ("batch changed", change_a_batch),
    "stale": ("too old", made_by(["l2", 1])),
    # version 3 of the lineage that ended at step 1 counts as 1: too old for step 4
    "weights of a dead lineage": ("too old", made_by(["l1", 3], ["l2", 3])),
    "refused": ("zombie", lambda story: story.first("submit", phase="ok").update(reply=["FENCED"])),
    "other bytes": ("zombie", group_of(3, crc="of somebody else")),
    "accepted after a later claim": ("zombie", accept_after_a_later_claim),
    "draw passed over": ("order", pass_a_draw_over),
    "enqueued twice": ("order", lambda story: story.enqueue(8, 9)),
    "wrong row": ("order", group_of(3, row=7)),
    "tokens of another group": ("not what was sampled", train_tokens_of_another_group),
    "another reward": ("not what was sampled", reward_by_another_number),
    "overwritten while held": ("changed while held", overwrite_a_batch_that_is_held),
    "no end": ("stuck", lambda story: story.events.remove(story.first("finished"))),
    "rest after the faults": ("stuck", lambda story: story.note("calm")),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(name: str) -> None:
    kind, plant = PLANTED[name]
    story = Story()
    plant(story)
    story.events.sort(key=lambda event: event["t"])
    assert judge(story).problems[kind]


def test_what_a_server_lost_may_be_gone_but_not_trained_twice() -> None:
    story = Story()
    change_a_batch(story)
    again = events_of(story, "delivered", 2)[1]
    story.events.insert(
        story.events.index(again),
        {"t": again["t"] - 0.5, "op": "fault", "kind": "x", "loses": True},
    )
    assert judge(story).clean, judge(story)
    train_twice(story)
    assert judge(story).problems["trained twice"]


def fail_over(story: Story, since: Event, until: Event) -> None:
    """Between these events a primary was replaced."""
    story.events.insert(
        story.events.index(until) + 1,
        {"t": until["t"] + 0.5, "op": "loss", "since": since["t"] - 0.5, "kind": "failover"},
    )


def judge_durable(story: Story) -> Verdict:
    return Checker(story.events, replace(RULES, durable=True, surely_fresh=1)).check()


def test_a_failover_may_change_a_batch_unless_replicas_were_waited_for() -> None:
    story = Story()
    change_a_batch(story)
    again = events_of(story, "delivered", 2)[1]
    fail_over(story, again, again)
    assert judge(story).clean, judge(story)
    assert judge_durable(story).problems["batch changed"]


def test_a_failover_may_lose_a_result_unless_replicas_were_waited_for() -> None:
    story = Story()
    first = story.first("submit", phase="ok")
    again = [
        deepcopy(story.first("claim")),
        *deepcopy(story.events[story.events.index(first) - 1 :][:2]),
    ]
    for number, event in enumerate(again, 1):
        event["t"] = first["t"] + number / 10
        event["args"]["token"] = "another"
    story.events += again
    fail_over(story, first, again[-1])
    story.events.sort(key=lambda event: event["t"])
    assert judge(story).clean, judge(story)
    assert judge_durable(story).problems["result lost"]
    # a trainer that forked away while the group was made may have made it too old
    opening = {"t": first["t"] - 0.001, "who": "trainer", "op": "trainer_open", "phase": "ok"}
    results = [event for event in story.events if event["op"] in ("claim", "submit")]
    assert lost_results(results, 1)
    results.append(opening)
    assert not lost_results(sorted(results, key=lambda event: event["t"]), 1)
    story.events = [event for event in story.events if event not in again]
    assert judge_durable(story).clean, judge_durable(story)


def test_an_enqueue_without_an_answer_may_have_happened() -> None:
    story = Story()
    story.script("enqueue", ["OK", 1, "11"], task="t", cursor=10)
    call = deepcopy(story.first("enqueue", phase="call"))
    call["args"], call["call"] = {"task": "t", "cursor": 9}, 99
    story.events.append(call)
    final(story)["cursors"]["t"] = 11
    final(story)["counters"]["t"] |= {"enqueued": 11, "cursor": 11}
    final(story)["stages"] |= {gid(9): ["waiting"], gid(10): ["waiting"]}
    assert judge(story).clean, judge(story)
