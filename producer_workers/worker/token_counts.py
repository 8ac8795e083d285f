"""How many tokens a worker's engine samples and reads, by task: for the account of tokens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from buffer.job import SampledTokens
from producer_workers.engines.base import TALLY, Tally


@dataclass(slots=True)
class _Claim:
    """`made`: by requests that ended. `expired`: of the group's earlier tokens, discarded."""

    made: int = 0
    expired: int = 0
    running: set[Tally] = field(default_factory=set)

    @property
    def tokens(self) -> int:
        # in this order: a request that ends meanwhile is missed rather than counted twice
        made = self.made
        return made + sum(tally.tokens for tally in [*self.running])


class TokenCounts:
    """Counts on the event loop; any thread may read. No total exceeds what the engine sampled."""

    def __init__(self) -> None:
        self._claims: dict[str, _Claim] = {}  # by gid
        self._closed = Counter[str]()  # by task, as those below
        self._prompt = Counter[str]()
        self._again = Counter[str]()
        self._requests = 0
        self._busy_s = 0.0  # less the time at which the requests that run began to, if any does

    def sampling_ms(self) -> int:
        """Return the time in which the engine had a request."""
        requests, busy_s = self._requests, self._busy_s
        return int(1000 * (busy_s + time.monotonic() * bool(requests)))

    @contextmanager
    def request(self, gid: str, prompt_tokens: int) -> Iterator[Tally]:
        """Count what the engine samples for a request in the block, also if that fails."""
        claim = self._claims.setdefault(gid, _Claim())
        self._prompt[_task(gid)] += prompt_tokens
        tally = Tally()
        claim.running.add(tally)
        self._requests += 1
        if self._requests == 1:
            self._busy_s -= time.monotonic()
        token = TALLY.set(tally)
        try:
            yield tally
        finally:
            TALLY.reset(token)
            claim.running.discard(tally)
            claim.made += tally.tokens
            self._requests -= 1
            if not self._requests:
                self._busy_s += time.monotonic()

    def resume(self, gid: str, again: int, expired: int) -> None:
        """Count a group that goes on: `again` of its tokens are read, `expired` are discarded."""
        self._claims.setdefault(gid, _Claim()).expired += expired
        self._again[_task(gid)] += again

    def end(self, gid: str) -> None:
        """Close the claim of a group, once the server has answered how it ended."""
        if claim := self._claims.pop(gid, None):
            self._closed[_task(gid)] += claim.tokens

    def of(self, gid: str) -> SampledTokens:
        claim = self._claims.get(gid) or _Claim()
        total, closed = self._totals(_task(gid))
        return SampledTokens(claim.tokens, claim.expired, total, closed)

    def total(self) -> int:
        return sum(self._totals(task)[0] for task in self._tasks())

    def text(self) -> str:
        """Return `TASK=TOTAL:CLOSED:PROMPT:AGAIN …` for heartbeats."""
        return " ".join(
            "{}={}:{}:{}:{}".format(task, *self._totals(task), self._prompt[task], again)
            for task in self._tasks()
            for again in [self._again[task]]
        )

    def _tasks(self) -> list[str]:
        return sorted({*[*self._prompt], *[*self._again]})

    def _totals(self, task: str) -> tuple[int, int]:
        closed = self._closed[task]
        claims = [*self._claims.items()]
        return closed + sum(claim.tokens for gid, claim in claims if _task(gid) == task), closed


def _task(gid: str) -> str:
    """Return the task of a group; a request may be of none, and has any id."""
    return gid.rpartition("-")[0]
