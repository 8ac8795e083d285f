"""Deals out faults: which, to whom and when is decided by a seed alone; what they meet is not.

A deck holds every kind of fault once for everybody it can hit; it is shuffled, dealt, and shuffled
again. So a run of any length has about as many of each.
"""

from __future__ import annotations

import heapq
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partialmethod
from itertools import count
from typing import Any

import redis

from proofs.chaos.crew import Crew
from proofs.chaos.faulty_link import Strike, Wiring
from proofs.chaos.history import History
from proofs.chaos.plan import LEASE_MS, SERVER

ERRORS = (
    "LOADING Redis is loading the dataset in memory",
    "READONLY You can't write against a read only replica.",
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "MISCONF Errors writing to the AOF file",
    "NOREPLICAS Not enough good replicas to write.",
    "OOM command not allowed when used memory > 'maxmemory'.",
)

ANSWERS_LOST = (
    "enqueue", "reissue", "pass_over", "producer_open", "beat", "claim", "heartbeat", "submit", "release", "register",
    "deregister", "reap", "reconcile", "expire", "forget", "trainer_open", "rescore", "take_batch", "commit", "publish_weights",
    "control", "silent",
)  # fmt: skip
"""Scripts that a run calls: of each, a reply is lost after the script was carried out."""

OF_PROCESSES = ("kill", "freeze", "term_kill", "term", "replace", "older_checkpoint")
"""What hits a process: dealt once all but one are at work."""

PAST_LEASE_S = 1.4 * LEASE_MS / 1000
SPELL_S = 0.6 * LEASE_MS / 1000
FULL_BYTES = 200_000
TERM_S = 0.3


@dataclass(frozen=True, slots=True)
class Card:
    """One fault: `deal` it to `target`."""

    kind: str
    target: str


class Nemesis:
    """Strikes `crew`, the wires and the server of one run."""

    def __init__(
        self, seed: int, crew: Crew, wiring: Wiring, server: Any, history: History
    ) -> None:
        self._random = random.Random(seed)
        self._crew = crew
        self._wiring = wiring
        self._server = server
        self._history = history
        self._deck: list[Card] = []
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    # -- cards ---------------------------------------------------------------

    def _new_deck(self) -> list[Card]:
        names = list(self._crew.members)
        cards = [Card(kind, name) for kind in OF_PROCESSES[:4] for name in names]
        cards += [Card("replace", "trainer"), Card("older_checkpoint", "trainer")] * 2
        cards += [
            Card("stall", name)
            for name, member in self._crew.members.items()
            if member.role == "worker"
        ] * 2
        kinds = ("rewrite_aof", *("script_flush", "drop_pubsub", "maxmemory") * 2)
        cards += [Card(kind, SERVER) for kind in (*kinds, *self._server_kinds())]
        cards += [Card(f"after:{script}", "anybody") for script in ANSWERS_LOST]
        cards += [
            Card(kind, self._random.choice(names))
            for kind in ("before", "mid_request", "mid_reply") * 3
        ]
        cards += [Card(f"answer:{place}", "anybody") for place in range(len(ERRORS))]
        cards += [
            Card(kind, self._random.choice(names))
            for kind in ("delay", "throttle", "split", "half_open") * 2
        ]
        self._random.shuffle(cards)
        return cards

    def _server_kinds(self) -> Sequence[str]:
        """Faults that only servers of one kind have."""
        return ()

    def strike(self) -> None:
        if not self._deck:
            self._deck = self._new_deck()
        # the first that can be dealt now; what hits a process waits until that is back at work
        place = next((i for i, card in enumerate(self._deck) if self._may_deal(card)), None)
        if place is None:
            return
        card = self._deck.pop(place)
        kind, _, detail = card.kind.partition(":")
        method: Any = getattr(self, f"_{kind}")
        method(detail or card.target)

    def _may_deal(self, card: Card) -> bool:
        return card.kind not in OF_PROCESSES or self._crew.are_at_work(card.target)

    def look(self) -> None:
        """Do what is due: wake who was frozen, kill who was told to end."""
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()

    def calm(self) -> None:
        """End all faults."""
        while self._later:
            heapq.heappop(self._later)[2]()
        self._wiring.calm()
        self._crew.resume_all()

    def _in(self, seconds: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), act))

    def _note(self, kind: str, target: str, **more: Any) -> None:
        self._history.note("fault", kind=kind, target=target, **more)

    def told(self, link: str, kind: str, script: str) -> None:
        """A strike met a command."""
        self._note(f"wire {kind}", link, script=script)

    # -- processes -----------------------------------------------------------

    def _kill(self, target: str) -> None:
        if self._crew.members[target].send(signal.SIGKILL):
            self._note("SIGKILL", target)

    def _term(self, target: str) -> None:
        if self._crew.members[target].send(signal.SIGTERM):
            self._note("SIGTERM", target)

    def _term_kill(self, target: str) -> None:
        member = self._crew.members[target]
        process = member.popen
        if process is not None and member.send(signal.SIGTERM):
            self._note("SIGTERM, then SIGKILL", target)
            self._in(self._random.uniform(0, TERM_S), process.kill)

    def _freeze(self, target: str) -> None:
        member = self._crew.members[target]
        process = member.popen
        if process is not None and member.send(signal.SIGSTOP):
            self._note("SIGSTOP past the lease", target, seconds=PAST_LEASE_S)
            self._in(PAST_LEASE_S, lambda: process.send_signal(signal.SIGCONT))

    def _replace(self, target: str) -> None:
        """A trainer sleeps, another one takes over, the first one wakes: it must find itself
        fenced.
        """
        member = self._crew.members[target]
        process = member.popen
        if process is not None and member.send(signal.SIGSTOP):
            self._note("replaced while it slept", target)
            self._crew.replace(target)
            self._in(PAST_LEASE_S, lambda: process.send_signal(signal.SIGCONT))

    def _older_checkpoint(self, target: str) -> None:
        """The trainer dies, and with it its newest checkpoint: it must go on from the one before."""
        member = self._crew.members[target]
        if member.popen is not None and member.send(signal.SIGKILL):
            member.popen.wait()
            *older, newest = [None, *sorted(self._crew.folders.checkpoints.glob("step-*"))]
            if newest and any(older):
                shutil.rmtree(newest)
            self._note("SIGKILL, newest checkpoint lost", target)

    # -- the server that holds the run ---------------------------------------

    def _on_server(self, kind: str, *command: str) -> None:
        if self._ask(*command):
            self._note(kind, SERVER)

    def _ask(self, *command: str) -> bool:
        """Whether the server did it: another fault may have it down, or full, just now."""
        try:
            with self._server.connect() as client:
                client.execute_command(*command)
        except redis.RedisError:
            return False
        return True

    def _script_flush(self, _: str) -> None:
        self._on_server("SCRIPT FLUSH", "SCRIPT", "FLUSH", "SYNC")

    def _drop_pubsub(self, _: str) -> None:
        self._on_server("pub/sub dropped", "CLIENT", "KILL", "TYPE", "pubsub")

    def _rewrite_aof(self, _: str) -> None:
        self._on_server("BGREWRITEAOF", "BGREWRITEAOF")

    def _maxmemory(self, _: str) -> None:
        try:
            with self._server.connect() as client:
                used = client.info("memory")["used_memory"]
        except redis.RedisError:  # another fault has it down
            return
        self._on_server("maxmemory reached", "CONFIG", "SET", "maxmemory", str(used + FULL_BYTES))
        self._in(SPELL_S, lambda: self._ask("CONFIG", "SET", "maxmemory", "0"))

    # -- the wires -----------------------------------------------------------

    def _after(self, script: str) -> None:
        self._wiring.anywhere.append(Strike("after", script))

    def _answer(self, place: str) -> None:
        self._wiring.anywhere.append(Strike("answer", reply=ERRORS[int(place)]))

    def _before(self, target: str) -> None:
        self._wiring.link(target).arm(Strike("before"))

    def _mid_request(self, target: str) -> None:
        self._wiring.link(target).arm(Strike("mid_request"))

    def _mid_reply(self, target: str) -> None:
        self._wiring.link(target).arm(Strike("mid_reply"))

    def _spell(self, kind: str, target: str, seconds: float = SPELL_S) -> None:
        self._wiring.link(target).cast(kind, seconds)
        self._note(f"wire {kind}", target, seconds=seconds)

    _delay = partialmethod(_spell, "delay")
    _throttle = partialmethod(_spell, "throttle")
    _split = partialmethod(_spell, "split")
    _half_open = partialmethod(_spell, "half_open")
    _stall = partialmethod(_spell, "stall", seconds=PAST_LEASE_S)
