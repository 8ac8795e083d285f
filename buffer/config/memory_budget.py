"""[memory] and [retention]: the bytes that a run may hold, and whether they are enough (I12)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator

from buffer.config.section import Section
from buffer.errors import ConfigError
from buffer.limits import Bytes
from buffer.readable import format_size
from buffer.wire.framing import MAX_BYTES, Compression, zstandard

TOKEN_BYTES = 12
"""Bytes of a generated token: id (4), logprob (4) and its text (4, the length of English tokens).
"""

PROMPT_TOKEN_BYTES = 16
"""Bytes of a prompt token: id and text, once as the prompt of the group and once in its result."""

GROUP_BYTES = 1024
SAMPLE_BYTES = 128
"""Bytes of a group and of each rollout besides tokens (measured: 365 with one rollout, 1,170 with
eight).
"""

PROMPT_TOKENS = 1024
"""Length of prompts that is assumed without [producer] max_prompt_tokens."""


class MemorySection(Section):
    """[memory]: how many bytes of prompts and results a run may hold on its server."""

    budget_bytes: Annotated[Bytes, Field(gt=0, le=1 << 50)] | None = None
    """bytes, as a number or text like "8GiB"; default: three quarters of the server's maxmemory, no
    limit where the server has none
    """
    low_water: float = Field(0.7, ge=0.01, le=1)
    """share of the budget above which no new prompt is started"""
    high_water: float = Field(0.9, ge=0.01, le=1)
    """share of the budget above which nothing is started; the rest is for the results of running
    groups
    """
    compression: Compression = "none"
    """compression of payloads; zstd needs `pip install '.[zstd]'`"""
    group_bytes: Annotated[Bytes, Field(gt=0, le=MAX_BYTES)] | None = None
    """bytes of a finished group, to check the budget with; default: an estimate for the longest
    responses
    """

    def problems(self) -> Iterator[str]:
        """Yield a problem if the marks are in the wrong order."""
        if self.low_water > self.high_water:
            yield f"low_water = {self.low_water} must not exceed high_water = {self.high_water}"

    @field_validator("compression")
    @classmethod
    def _check_installed(cls, method: Compression) -> Compression:
        if method == "zstd":
            try:
                zstandard()
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return method

    def budget(self, maxmemory_bytes: int) -> int:
        """Return the bytes that a run may hold on a server with that maxmemory; 0 = no limit."""
        # a quarter is for the index, for bytes in transit, and for fragmentation
        return self.budget_bytes or int(maxmemory_bytes * 0.75)


def estimate_group_bytes(samples: int, max_tokens: int, prompt_tokens: int | None) -> int:
    """Return the bytes of a finished group whose responses all have `max_tokens`."""
    prompt = (PROMPT_TOKENS if prompt_tokens is None else prompt_tokens) * PROMPT_TOKEN_BYTES
    return GROUP_BYTES + prompt + samples * (SAMPLE_BYTES + max_tokens * TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The groups that a run must be able to hold at once.

    `batches`: those that no checkpoint has freed yet. `in_flight`: groups ahead of them.
    """

    group_bytes: int
    batches: int
    batch_size: int
    in_flight: int

    def problem(self, memory: MemorySection, budget: int) -> str:
        """Return why `budget` is not enough, and what would be; "" where it is enough."""
        batch = self.batch_size * self.group_bytes
        stay = self.batches * batch
        ahead = self.in_flight * self.group_bytes
        # beside a single batch, responses of dead letters may fill half of the low mark
        enough = max(int(max(stay, 2 * batch) / memory.low_water) + 1, stay + ahead)
        if budget == 0 or budget >= enough:
            return ""
        return (
            f"a memory budget of {format_size(budget)} cannot hold one checkpoint interval: "
            f"{self.batches} batches of {self.batch_size} groups of "
            f"{format_size(self.group_bytes)} stay until a checkpoint frees them "
            f"({format_size(stay)}, below low_water = {memory.low_water}), and {self.in_flight} "
            f"more groups may be in flight ({format_size(ahead)}). "
            f"Set [memory] budget_bytes (or the server's maxmemory) for {format_size(enough)}, "
            "or write checkpoints more often ([trainer] checkpoint_every_steps, keep_checkpoints), "
            "or give the real size of a group ([memory] group_bytes)"
        )


class RetentionSection(Section):
    """[retention]: which batches stay readable after they were trained and committed."""

    policy: Literal["none", "last", "export", "archive"] = "none"
    """none: a committed batch is freed at once. last: the last `batches` of them stay. export: a
    batch stays until `rolloutmq export --archived` has copied it. archive: until the trainer has
    written it to `folder`, for `rolloutmq replay` (the trainer needs `pip install '.[zstd]'`).
    The last `batches` of them stay after that
    """
    folder: str = ""
    """for policy = "archive": a folder, or the URL of a bucket; default: `archive` in the run's
    folder
    """
    batches: int = Field(0, ge=0, le=1_000_000)
    """archived batches that stay; their bytes count against the memory budget"""

    def problems(self) -> Iterator[str]:
        """Yield a problem if `batches` does not fit the policy."""
        if self.policy == "last" and not self.batches:
            yield 'policy = "last" needs batches = N of at least 1'
        if self.policy == "none" and self.batches:
            yield 'batches is only used by policy = "last", "export" or "archive"'
        if self.folder and self.policy != "archive":
            yield 'folder is only used by policy = "archive"'
