"""Limits on calls: what all callers together get, and what remains when one dies or a reply is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buffer.control.call_limit import Caller, CallerState, CallLimit
from buffer.ids import new_nonce
from buffer.redis.keys import LIMITS, Keys
from buffer.redis.store import Store
from tests.servers import Server

LEASE_MS = 60_000
SPACED_MS = 60_000 / (6000 * 0.975)
"""The time between two permits of 6000 calls a minute."""


class Club:
    """Callers of one limit, whose permits are recorded by the server's clock."""

    def __init__(self, server: Server) -> None:
        self.store = Store(server.url)
        self.raw: Any = server.client
        self.name = new_nonce()
        self.keys = Keys(self.name, LIMITS)
        self.times: list[tuple[float, str]] = []

    def now_ms(self) -> float:
        seconds, micros = self.store.at(self.keys.prefix).client.time()
        return float(seconds * 1000 + micros / 1000)

    def join(self, flow: str = "run task", lease_ms: int = LEASE_MS, **limits: int) -> Member:
        limit = CallLimit(self.name, **limits)
        return Member(self, flow, Caller(self.store, limit, flow, lease_ms))

    def field(self, name: str) -> float:
        return float(self.raw.hget(self.keys.slots()["limit"], name) or 0)

    def close(self) -> None:
        self.store.close()


class Member:
    def __init__(self, club: Club, flow: str, caller: Caller) -> None:
        self.club = club
        self.flow = flow
        self.caller = caller
        self.state = CallerState()

    def ask(self, wanted: int = 0, tokens: int = 0, **changes: Any) -> int:
        """Ask for calls, and note the permits; return their number."""
        self.state = replace(self.state, **changes)
        _, delays_s = self.caller.ask(self.state, [tokens] * wanted)
        now_ms = self.club.now_ms()
        self.club.times += [(now_ms + 1000 * delay_s, self.flow) for delay_s in delays_s]
        self.state.known += len(delays_s)
        return len(delays_s)

    def end(self, calls: int = 1, **changes: Any) -> None:
        self.ask(ended=self.state.ended + calls, **changes)


@pytest.fixture
def club(server: Server) -> Iterator[Club]:
    with closing(Club(server)) as one:
        yield one


def until(holds: Callable[[], object]) -> None:
    for _ in range(3000):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail("30 s have passed")


def test_permits_of_all_callers_are_spread_evenly(club: Club) -> None:
    members = [club.join(f"run t{n}", requests_per_minute=6000) for n in range(5)]
    began_ms = club.now_ms()
    while len(club.times) < 300:
        for member in members:
            member.ask(64)
    # one may be fetched late: what is spread is the time that the server reserves for each
    reserved_ms = club.field("next_request_ms") - began_ms
    # the server reads whole milliseconds, and keeps microseconds
    assert reserved_ms >= len(club.times) * SPACED_MS - 2


def test_flows_have_one_turn_each_whatever_the_number_of_their_callers(club: Club) -> None:
    many = [club.join("a math", requests_per_minute=6000) for _ in range(6)]
    few = [
        club.join("b math", requests_per_minute=6000),
        club.join("b code", requests_per_minute=6000),
    ]
    for member in [*many, *few]:
        member.ask(64)
    club.times.clear()  # the first one had no competitors
    while len(club.times) < 300:
        for member in [*many, *few]:
            member.ask(64)
    flows = [flow for _, flow in club.times]
    assert all(flows.count(flow) > 80 for flow in ("a math", "b math", "b code"))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["ask", "end", "repeat", "die", "forget"])),
        max_size=60,
    )
)
def test_calls_in_progress_are_never_more_than_the_limit(
    server: Server, moves: list[tuple[int, str]]
) -> None:
    """Of living callers; `repeat`: a call whose reply was lost, `forget`: the server's data."""
    with closing(Club(server)) as club:
        members = [club.join(f"run t{n}", at_once=5) for n in range(4)]
        dead = 0
        for number, move in moves:
            member = members[number]
            before = replace(member.state)
            match move:
                case "ask":
                    member.ask(3)
                case "end" if member.state.ended < member.state.known:
                    member.end()
                case "repeat":
                    got = member.ask(3)
                    member.state = before
                    assert member.ask(3) == got
                case "die":
                    dead += member.state.known - member.state.ended
                    members[number] = club.join(f"run t{number}", at_once=5)
                case "forget" if not dead:
                    for key in club.raw.scan_iter(f"{club.keys.prefix}*"):
                        club.raw.unlink(key)
                    for each in members:
                        each.ask()
            living = sum(each.state.known - each.state.ended for each in members)
            assert living + dead <= 5


def test_slots_of_a_dead_caller_are_free_again_after_its_lease(club: Club) -> None:
    dead, living = club.join(lease_ms=400, at_once=2), club.join(lease_ms=400, at_once=2)
    assert dead.ask(2) == 2
    began = time.monotonic()
    assert living.ask(2) == 0
    until(lambda: living.ask(2))
    assert time.monotonic() - began > 0.3


def test_slots_of_a_caller_that_renews_its_lease_stay(club: Club) -> None:
    busy, other = club.join(lease_ms=400, at_once=1), club.join(lease_ms=400, at_once=1)
    assert busy.ask(1) == 1
    for _ in range(20):
        busy.ask()
        assert other.ask(1) == 0
        time.sleep(0.05)
    busy.end()
    assert other.caller.wait(10.0), "the end of the call rings"
    assert other.ask(1) == 1


def test_refusal_makes_all_callers_wait_and_then_go_slower_for_a_while(club: Club) -> None:
    one, other = (
        club.join("a t", requests_per_minute=6000),
        club.join("b t", requests_per_minute=6000),
    )
    assert one.ask(1) == 1
    refused_ms = club.now_ms()
    one.end(refused=1, pause_ms=3000)
    assert other.ask(8) == 0
    until(lambda: other.ask(8))
    assert min(at for at, flow in club.times if flow == "b t") >= refused_ms + 3000 - 1
    assert club.field("speed") == 0.5
    until(lambda: club.now_ms() > club.field("paused_ms"))
    until(lambda: one.ask(1))
    one.end(refused=2, pause_ms=3000)
    assert 0.25 <= (speed := club.field("speed")) < 0.5
    # a refusal of a call that was on its way does not halve it again
    other.ask(refused=1)
    assert club.field("speed") == speed
    minute_ago = int(club.now_ms() - 60_000)
    key = club.keys.slots()["limit"]
    club.raw.hset(key, mapping={"speed_ms": minute_ago, "paused_ms": minute_ago})
    assert other.ask(8) == 8
    assert club.times[-1][0] - club.times[-8][0] == pytest.approx(7 * SPACED_MS, abs=1.5)


def test_pauses_double_up_to_a_minute_until_none_is_refused_for_a_minute(club: Club) -> None:
    one = club.join(at_once=8)
    key, pauses_s = club.keys.slots()["limit"], []

    def refuse() -> None:
        until(lambda: one.ask(1))
        one.end(refused=one.state.refused + 1, pause_ms=0)
        pauses_s.append(round((club.field("paused_ms") - club.now_ms()) / 1000))
        club.raw.hset(key, mapping={"paused_ms": 0, "speed_ms": int(club.now_ms())})

    for _ in range(8):
        refuse()
    assert pauses_s == [1, 2, 4, 8, 16, 32, 60, 60]
    club.raw.hset(key, "speed_ms", int(club.now_ms() - 60_000))
    refuse()
    assert pauses_s[-1] == 1


def test_lowest_quota_that_a_living_run_sets_counts(club: Club) -> None:
    club.join("a t", lease_ms=500, at_once=1).ask(1)
    other = club.join("b t", lease_ms=500, at_once=50)
    assert other.ask(40) == 0
    until(lambda: other.ask(40) == 40)


def test_tokens_that_were_not_used_are_given_to_others(club: Club) -> None:
    one = club.join(tokens_per_minute=60_000)
    assert one.ask(1, tokens=600) == 1
    reserved = club.field("next_token_ms")
    assert reserved - club.now_ms() > 300
    one.end(unused=500)
    assert club.field("next_token_ms") < reserved - 450


def test_tokens_of_a_large_call_stay_reserved_whatever_small_calls_follow(club: Club) -> None:
    one, other = club.join(tokens_per_minute=60_000), club.join("b t", tokens_per_minute=60_000)
    assert one.ask(1, tokens=20_000) == 1
    reserved = club.field("next_token_ms")
    one.end()
    for _ in range(5):
        assert other.ask(1, tokens=1) == 0
        other.ask()
    assert club.field("next_token_ms") == reserved


def test_clock_that_was_set_back_delays_nobody_for_long(club: Club) -> None:
    one = club.join(requests_per_minute=6000)
    one.ask(1)
    club.raw.hset(club.keys.slots()["limit"], "next_request_ms", club.now_ms() + 3_600_000)
    until(lambda: one.ask(1))
    assert club.times[-1][0] < club.now_ms() + 2000
