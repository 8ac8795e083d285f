"""[strategy] and [tasks.<name>.strategy]: which groups are started, kept, retried and discarded.

Names and defaults are those of XTuner where the meaning is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from buffer.config.section import YEAR_S, DottedPath, Section
from buffer.imports import is_dotted_path
from buffer.limits import TaskSettings

FILTERS = {"not_all_equal": "producer_workers.worker.task_runner:not_all_equal"}
"""The filters with a name, and their functions. To add one, write its function and add it here."""


class StrategySection(Section, TaskSettings):
    """[strategy]: how far the producer runs ahead, and what happens to old and bad groups."""

    # what can change while the run continues is declared in TaskSettings

    kind: Literal["async", "sync"] = "async"
    """async: run ahead of the trainer as far as [policy] max_ahead allows. sync: make exactly
    the batches that the newest weights serve, and replace filtered groups
    """
    enable_partial_rollout: bool = False
    """an interrupted rollout keeps its tokens and continues from them. Finished rollouts of its
    group keep theirs in any case
    """
    is_valid_sample_fn: str | None = None
    """filter of completed groups; groups that it rejects are replaced. not_all_equal (the rewards
    differ, as in DAPO), or a function of yours as package.module:function that is given the
    rollouts of a group; default: all groups are trained on
    """
    should_continue_fn: DottedPath | None = None
    """a function of yours as package.module:function, called in every round with (completed,
    wanted, progress=…); once it returns False, the next batch is what is completed; default:
    continue until the batch is complete
    """
    on_failed_member: Literal["drop", "train"] = "drop"
    """a rollout that fails is generated again alone, up to max_tries times on a worker. After the
    last time, drop: its group has used up a try, and starts again as a whole. train: the group is
    trained without it if at least 2 are left; your trainer must accept smaller groups. Evaluations
    always drop
    """
    group_time_limit_s: float | None = Field(None, gt=0, le=YEAR_S)
    """working time after which a group on a worker counts as a failed try; default: no limit"""

    @field_validator("is_valid_sample_fn")
    @classmethod
    def _check_filter(cls, name: str | None) -> str | None:
        if name is not None and name not in FILTERS and not is_dotted_path(name):
            raise ValueError(f"expected {', '.join(FILTERS)} or package.module:function")
        return name

    def problems(self) -> Iterator[str]:
        """Yield settings that kind sync excludes."""
        runs_ahead = self.over_sample_threshold > 0 or self.on_straggler == "retry"
        if self.kind == "sync" and runs_ahead:
            yield (
                "sync starts exactly the batch: over_sample_threshold and on_straggler = "
                '"retry" need kind async'
            )
        if self.tail_batch_trigger_size and self.on_straggler != "retry":
            yield 'tail_batch_trigger_size needs on_straggler = "retry"'

    def overridden(self, own: StrategySection | None) -> StrategySection:
        """Return these settings with those that a task sets itself in their place."""
        return self if own is None else self.model_copy(update=own.model_dump(exclude_unset=True))

    def own_numbers(self) -> dict[str, Any]:
        """Return the live settings that were set here, by name."""
        return self.model_dump(include=set(TaskSettings.model_fields), exclude_unset=True)
