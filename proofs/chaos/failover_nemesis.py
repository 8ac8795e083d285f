"""Faults of a primary that has replicas: killed, frozen, or cut off with some of the clients.

One such fault at a time: it begins when all replicas follow, and is over when they do so again. In
between the servers may lose what no replica had; the history has the whole time as a `loss`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis

from proofs.chaos.nemesis import Card, Nemesis
from proofs.chaos.plan import SERVER
from proofs.chaos.replicated import JUDGING, source_of
from tests.cluster import Node

KINDS = ("primary_kill", "partition", "primary_freeze", "lagging_kill")
POLL_S = 0.2
PROMOTION_S = 40.0
"""Nobody was promoted for so long: all is put back as it was."""

WHOLE_S = 60.0
LAG_S = 0.6
LONGEST_AWAY_S = 3.0
UNNOTICED_S = 5.0
"""Before a failover that nobody ordered: a busy machine can make servers think that one is dead."""


class FailoverNemesis(Nemesis):
    """Strikes a primary and its replicas, too."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._since = 0.0
        self._calming = False
        self._known: tuple[float, Node | None] = (0.0, None)

    def _server_kinds(self) -> Sequence[str]:
        return (*KINDS, *("primary_kill", "partition") * 2)

    def _may_deal(self, card: Card) -> bool:
        if card.kind not in KINDS:
            return super()._may_deal(card)
        return not self._since and self._holds(self._server.is_whole)

    def look(self) -> None:
        """As Nemesis; and notice a failover that no fault caused."""
        super().look()
        seen, known = self._known
        if self._since or time.time() < seen + 1:
            return
        try:
            now = self._server.primary()
        except redis.RedisError:
            return
        if known and now and now is not known:
            self._history.note("loss", since=seen - UNNOTICED_S, kind="failover of its own")
        self._known = (time.time(), now or known)

    def calm(self) -> None:
        """As Nemesis; all servers follow one of them afterwards."""
        self._calming = True
        super().calm()

    def _holds(self, condition: Callable[[], bool]) -> bool:
        """A server that changes its role disconnects whoever asks it: so it does not hold yet."""
        try:
            return condition()
        except redis.RedisError:
            return False

    # -- the faults ----------------------------------------------------------

    def _begin(self, kind: str, **more: Any) -> Node:
        self._since = time.time()
        self._note(kind, SERVER, **more)
        primary: Node = self._server.primary()
        return primary

    def _primary_kill(self, _: str) -> None:
        old = self._begin("primary SIGKILL")
        old.kill()
        self._bring_back(old, old.start)

    def _lagging_kill(self, _: str) -> None:
        old = self._begin("primary SIGKILL, replicas behind")
        replicas = [node for node in self._server.nodes if node is not old]
        for node in replicas:
            node.signal(signal.SIGSTOP)
        # what is sent already would be read once they go on
        old.ask("CLIENT", "KILL", "TYPE", "replica")

        def kill() -> None:
            old.kill()
            for node in replicas:
                node.signal(signal.SIGCONT)
            self._bring_back(old, old.start)

        self._in(LAG_S, kill)

    def _primary_freeze(self, _: str) -> None:
        """It wakes as a primary, with commands that it has not read yet."""
        old = self._begin("primary SIGSTOP past its replacement")
        old.signal(signal.SIGSTOP)
        self._bring_back(old, lambda: old.signal(signal.SIGCONT))

    def _partition(self, _: str) -> None:
        old = self._server.primary()
        clients = list(self._crew.members)
        left = self._random.sample(clients, self._random.randrange(len(clients)))
        self._begin("partition", with_primary=left)
        self._server.backbone.isolate(source_of(old))
        away = {way.name for way in self._server.ways} - {str(old.port), JUDGING}
        for name in clients:
            self._wiring.cut(name, away if name in left else {str(old.port)})

        def heal() -> None:
            self._server.backbone.isolate("")
            for name in clients:
                self._wiring.cut(name, set())

        self._bring_back(old, heal)

    def _bring_back(self, old: Any, heal: Callable[[], object]) -> None:
        pause = self._random.uniform(0, LONGEST_AWAY_S)
        self._wait(
            lambda: self._server.primary(without=old) not in (None, old),
            PROMOTION_S,
            lambda: self._in(pause, lambda: self._end(heal)),
        )

    def _end(self, heal: Callable[[], object]) -> None:
        heal()
        self._wait(self._is_settled, WHOLE_S, self._over)

    def _is_settled(self) -> bool:
        """Whether all follow one primary again, and have their memory back."""
        if not self._server.is_whole():
            return False
        self._server.config_set("maxmemory", "0")
        return True

    def _over(self) -> None:
        self._history.note("loss", since=self._since, kind="failover")
        self._known = (0.0, None)
        self._since = 0.0

    def _wait(
        self, condition: Callable[[], bool], seconds: float, then: Callable[[], object]
    ) -> None:
        """Look again and again, from the harness's own turns."""
        if self._holds(condition) or seconds <= 0:
            then()
        elif self._calming:
            time.sleep(POLL_S)
            self._wait(condition, seconds - POLL_S, then)
        else:
            self._in(POLL_S, lambda: self._wait(condition, seconds - POLL_S, then))
