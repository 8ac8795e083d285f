"""`limit = { … }`: how often a service may be asked, by the workers of all runs together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING

from pydantic import Field

from buffer.config.section import Count, Section
from buffer.control.call_limit import CallLimit

if TYPE_CHECKING:
    from buffer.run.run import Run
    from producer_workers.call_turns import Turns


class CacheSection(Section):
    """cache: verdicts that are kept in Redis, for all workers of the run.

    A verdict is known by the judge (its name, the source of its module or its URL, a language
    model's settings) and by all that it read: prompt, response, ground truth, `extra`.
    """

    max_entries: Count = Field(100_000, ge=2)
    """most verdicts; the older half is dropped when there are more"""
    max_mb: Count = Field(64, ge=1)
    """most MiB of them"""


class LimitSection(Section):
    """limit: the quota of a service, which all workers of all runs on one server keep together.

    A call waits for its turn, and its time limit begins only then. When the service refuses a call
    (429), all wait for as long as it says, then go on at half the speed, which rises again within a
    minute. While it refuses all calls, the waits double, from a second to a minute. Tasks, and
    runs, that wait have one turn each.
    """

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """runs on one server whose limits have the same name share the quota, for example that of an
    account; default: the host of the service's URL, or else the run and the task
    """
    requests_per_minute: Count = Field(0, ge=0)
    """calls in any minute, evenly spread; 0: no limit"""
    tokens_per_minute: Count = Field(0, ge=0)
    """tokens of prompts and answers in any minute, of calls that know theirs (judge `llm`); 0: no
    limit
    """
    at_once: Count = Field(0, ge=0)
    """calls in progress; those of a worker that died are free again after its lease; 0: no limit"""

    def problems(self) -> Iterator[str]:
        if not (self.requests_per_minute or self.tokens_per_minute or self.at_once):
            yield "set at least one of requests_per_minute, tokens_per_minute and at_once"

    def turns(self, run: Run, task: str, service: str) -> Turns:
        """Return the turns of a task's calls of a service: a URL, or another name."""
        from producer_workers.call_turns import Turns

        host = service.partition("://")[2].partition("/")[0].rpartition("@")[2]
        name = re.sub(r"[^\w.-]", "_", self.name or host or f"{run.name}.{service}", flags=re.ASCII)
        numbers = (self.requests_per_minute, self.tokens_per_minute, self.at_once)
        if len(name) > 64:  # a key takes no more, and another service must not get its quota
            name = blake2b(name.encode(), digest_size=16).hexdigest()
        limit = CallLimit(name, *numbers)
        return Turns(run.store, limit, f"{run.name} {task}", run.limits.lease_ms)
