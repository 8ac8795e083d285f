"""The interface of a judge that a package attaches to tasks, with a key and values of its own.

It judges the groups that a task's own judge has scored and its filter keeps, and adds columns of
tokens. An entry point of the group `rolloutmq.judges` names the class; `[tasks.<name>.<key>]` has
its values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from buffer.imports import load_object
from buffer.wire.rollout import RolloutState
from producer_workers.config.engine import EngineConfig
from producer_workers.hub import Repository


class ColumnJudge(ABC):
    """Judges whole groups of one task, many at once. `name`: in messages."""

    name: str

    async def open(self) -> None:  # noqa: B027
        """Load what it needs, before its worker joins the run. Raises ConfigError, ModelError."""

    @abstractmethod
    async def ask(self, states: Sequence[RolloutState]) -> Sequence[Mapping[str, Any]]:
        """Return the columns of each rollout of a group, by name, as a judge's answer has them.

        Numbers in an answer stand beside the rollout's reward. Raises JudgeError, which fails the
        group, and EngineDeadError, which ends the worker and costs the group no try.
        """

    async def close(self) -> None:  # noqa: B027
        """End what `open` has started."""


class OwnEngine(NamedTuple):
    """An engine that a judge starts in each worker, on the worker's devices."""

    settings: EngineConfig
    folder: Callable[[], Path]
    """returns the folder of its model; raises HubError"""


class AttachedJudge:
    """The values of [tasks.<name>.<key>], which pydantic makes.

    `config`: the `ProducingConfig` of the process.
    """

    scored_by: ClassVar[str] = ""
    """the `Judge` of these values, as module:Class, if a task's `judge` may have its key as name"""

    def scorer(self, judging: Any) -> Any:
        """Return the `Judge` of these values. Raises ConfigError."""
        return load_object(self.scored_by, kind="judge")(self, judging)

    @property
    def weights(self) -> Mapping[str, float]:
        """Return the weights of its columns in the loss, by what names them beside their kind."""
        return {}

    @property
    def repositories(self) -> Iterable[Repository]:
        """Return the repositories of the Hub that it reads."""
        return ()

    def pinned(self, commits: Mapping[Repository, Repository]) -> Self:
        """Return the same values with a commit for each of `repositories`."""
        return self

    @classmethod
    def rules(cls, config: Any) -> Iterator[str]:
        """Yield where values of it contradict another section of the config."""
        yield from ()

    @classmethod
    def checks(cls, config: Any) -> Mapping[str, Callable[[], str]]:
        """Return by name what `rolloutmq check` calls; each returns what it has found, or raises.

        They neither load a model nor ask a server.
        """
        return {}

    @classmethod
    def engines(cls, config: Any) -> Mapping[str, OwnEngine]:
        """Return the engines that each worker starts for it, by the name in messages."""
        return {}

    @classmethod
    def judges(cls, config: Any, tasks: Sequence[str]) -> Mapping[str, ColumnJudge]:
        """Return what adds columns to each of `tasks`, for one worker. Raises ConfigError."""
        return {}
