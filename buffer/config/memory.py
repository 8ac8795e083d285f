"""The config section [memory], and whether its budget is enough for what a run must hold at once
(I12).

The config section [retention], which both sides share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator, model_validator

from buffer.config.loader import Section
from buffer.errors import ConfigError
from buffer.model.byte_size import ByteSize, format_size
from buffer.model.compression import Compression, zstandard

SHARE_OF_SERVER = 0.75
"""Of maxmemory, where no budget is given: the rest is for the index, for bytes on their way in and
out, and for what the allocator wastes.
"""

TOKEN_BYTES = 12
"""A generated token: id (4), logprob (4) and its text (4, as long as English tokens are)."""

PROMPT_TOKEN_BYTES = 16
"""A token of the prompt: id and text, once as the prompt of the group and once with its result."""

GROUP_BYTES = 1024
SAMPLE_BYTES = 128
"""What a group and each of its rollouts have besides tokens (measured: 365 bytes with one, 1,170
with eight).
"""

PROMPT_TOKENS = 1024
"""Assumed where [producer] max_prompt_tokens does not say."""


class MemorySection(Section):
    """[memory]: how many bytes of prompts and results a run may hold on its server."""

    budget_bytes: ByteSize | None = None
    """a number, or text like "8GiB"; default: three quarters of the server's maxmemory, no bound
    where it has none
    """
    low_water: float = Field(0.7, gt=0, le=1)
    """share of the budget from which no new prompt is started"""
    high_water: float = Field(0.9, gt=0, le=1)
    """share from which nothing is started; what is above it is room for the results of groups that
    run
    """
    compression: Compression = "none"
    """none, or zstd for payloads (pip install 'rolloutmq[zstd]')"""
    group_bytes: ByteSize | None = None
    """bytes of a finished group, to see whether the budget is enough; default: estimated, for the
    longest responses
    """

    @model_validator(mode="after")
    def _check_order(self) -> MemorySection:
        if self.low_water > self.high_water:
            raise ValueError(
                f"low_water = {self.low_water} is above high_water = {self.high_water}"
            )
        return self

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
        """Bytes that a run may hold on a server with that maxmemory; 0 = no bound."""
        return self.budget_bytes or int(maxmemory_bytes * SHARE_OF_SERVER)


def estimate_group_bytes(samples: int, max_tokens: int, prompt_tokens: int | None) -> int:
    """Bytes of a finished group whose responses are as long as they may be."""
    prompt = (PROMPT_TOKENS if prompt_tokens is None else prompt_tokens) * PROMPT_TOKEN_BYTES
    return GROUP_BYTES + prompt + samples * (SAMPLE_BYTES + max_tokens * TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a run must be able to hold: batches that no checkpoint frees yet, and what runs ahead of
    them.
    """

    group_bytes: int
    batches: int
    batch_size: int
    in_flight: int

    def problem(self, memory: MemorySection, budget: int) -> str:
        """Why `budget` is not enough, and what would be; '' where it is."""
        stay = self.batches * self.batch_size * self.group_bytes
        ahead = self.in_flight * self.group_bytes
        enough = max(int(stay / memory.low_water) + 1, stay + ahead)
        if budget == 0 or budget >= enough:
            return ""
        return (
            f"a memory budget of {format_size(budget)} cannot hold one checkpoint interval: {self.batches} batches of "
            f"{self.batch_size} groups of {format_size(self.group_bytes)} stay until a checkpoint frees them "
            f"({format_size(stay)}, below low_water = {memory.low_water}), and {self.in_flight} more groups may be in "
            f"flight ({format_size(ahead)}). Set [memory] budget_bytes (or the server's maxmemory) for "
            f"{format_size(enough)}, or write checkpoints more often ([trainer] checkpoint_every_steps, "
            "keep_checkpoints), or say how large a group really is ([memory] group_bytes)"
        )


class RetentionSection(Section):
    """[retention]: what is kept of batches that are trained and committed."""

    policy: Literal["none", "last", "export"] = "none"
    """none: they are freed at once; last: the last `batches` of them stay readable; export: each
    stays until an exporter has said that it copied it, and the last `batches` of them after that
    """
    batches: int = Field(0, ge=0)
    """archived batches that stay, with their bytes: they count against the server's memory"""

    @model_validator(mode="after")
    def _check_batches(self) -> RetentionSection:
        if self.policy == "last" and not self.batches:
            raise ValueError('policy = "last" needs batches = N, of at least 1')
        if self.policy == "none" and self.batches:
            raise ValueError('batches is only used by policy = "last" or "export"')
        return self
