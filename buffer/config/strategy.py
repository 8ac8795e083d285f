"""[strategy], and [tasks.<name>.strategy] where a task wants its own: what is started, kept,
retried and thrown away.

Names and defaults are XTuner's where the thing is the same.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from buffer.config.loader import Section
from buffer.model.dotted_path import is_dotted_path

FILTERS = ("not_all_equal",)
"""Filters that are told by name; `producer_workers.worker.loop_result` has their functions."""


class StrategySection(Section):
    """[strategy]: how far the producer runs ahead, and what becomes of interrupted, old and useless
    groups.
    """

    kind: Literal["async", "sync"] = "async"
    """async runs ahead of the trainer as far as [policy] max_staleness allows; sync makes exactly
    the batches that the newest weights are to serve, and refills what was filtered
    """
    over_sample_threshold: float = Field(0.0, ge=0)
    """groups started beyond the batch, as a share of it: 0.5 starts half a batch more"""
    enable_partial_rollout: bool = False
    """an interrupted group keeps its tokens and goes on from them"""
    tail_batch_trigger_size: int = Field(-1, ge=-1)
    """expired groups: -1 drops them, 0 retries them at once, N retries them first once there are N"""
    tail_batch_max_tries: int | None = Field(None, ge=1)
    """a group that was interrupted so often waits with the expired ones for the tail batch (if it
    has no tokens), and is finished once it runs again: a pause of kind abort waits for it, half of
    [lease] pause_timeout_s at most; default: never, it starts again for as long as it is
    interrupted
    """
    is_valid_sample_fn: str | None = None
    """which completed groups are worth training on, the others are filtered and made up for:
    not_all_equal (rewards that differ, as DAPO wants), or your function of a group's rollouts as
    package.module:function; default: all
    """
    should_continue_fn: str | None = None
    """your function as package.module:function of (completed, wanted, progress=…), asked in every
    round: once it says no, the next batch is what there is; default: until the target is reached
    """
    group_time_limit_s: float | None = Field(None, gt=0)
    """a group that takes a worker longer has failed a try; default: no limit"""

    max_in_flight: int | None = Field(None, ge=1)
    """groups that wait or run at most; default: as many as the strategy asks for"""
    max_consecutive_failures: int | None = Field(None, ge=1)
    """a task of which so many tries fail or are filtered one after the other is stopped, with its
    reason, until `rolloutmq continue --task`; default: never
    """

    @field_validator("is_valid_sample_fn")
    @classmethod
    def _check_filter(cls, name: str | None) -> str | None:
        if name is not None and name not in FILTERS and not is_dotted_path(name):
            raise ValueError(f"expected {', '.join(FILTERS)} or package.module:function")
        return name

    @field_validator("should_continue_fn")
    @classmethod
    def _check_should_continue(cls, name: str | None) -> str | None:
        if name is not None and not is_dotted_path(name):
            raise ValueError("expected package.module:function")
        return name

    @model_validator(mode="after")
    def _check_sync(self) -> StrategySection:
        if self.kind == "sync" and (
            self.over_sample_threshold > 0 or self.tail_batch_trigger_size > -1
        ):
            raise ValueError(
                "sync starts exactly the batch; over_sample_threshold, tail_batch_trigger_size are for async"
            )
        return self

    def overridden(self, own: StrategySection | None) -> StrategySection:
        """These settings, with those that a task gives itself in their place."""
        return self if own is None else self.model_copy(update=own.model_dump(exclude_unset=True))
