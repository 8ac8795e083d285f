"""The values of a teacher in [tasks.<name>.teachers.<teacher>], and where they are in a config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from buffer.config.section import Section
from producer_workers.config.engine import EngineConfig
from producer_workers.hub import Repository, repository

if TYPE_CHECKING:
    from producer_workers.config.producing import ProducingConfig


class TeacherSection(Section):
    """[tasks.<name>.teachers.<teacher>]: a model that scores the tokens of finished rollouts.

    It needs the tokenizer of the run's model. Each rollout worker loads it beside its own engine,
    or asks a server (`engine` of kind http). Teachers of one name are the same in all tasks: model,
    revision and engine must agree.
    """

    model: Path | None = None
    """a Hugging Face folder, or the id of a model on the Hub; default: the model that the run
    starts from, as a frozen reference. With an engine of kind http: the folder whose tokenizer is
    compared
    """
    revision: str | None = None
    """branch, tag or commit of a model on the Hub; default: the newest commit, kept by the run"""
    weight: float = Field(1.0, ge=0, le=1e6)
    """weight of its logprobs in the loss"""
    sources: list[str] = Field(default_factory=list)
    """patterns of the data sources whose rollouts it scores; default: all"""
    top_k: int = Field(0, ge=0, le=1024)
    """most probable tokens of which it also gives id and logprob at every position, 8 bytes each"""
    engine: EngineConfig | None = None
    """its engine, with all keys of [engine]; default: the values of [engine]"""

    def problems(self) -> Iterator[str]:
        if self.revision and self.repository is None:
            yield f"revision = {self.revision} is for a model on the Hub: {self.model} is none"

    @property
    def repository(self) -> Repository | None:
        """Return the repository of the model; None for a folder."""
        return repository(self.model, self.revision, "model")

    def folder(self, config: ProducingConfig) -> Path:
        """Return the folder of the model. Raises HubError where it is not in the cache."""
        if self.repository:
            return self.repository.folder()
        return self.model or config.model_folder

    def settings(self, config: ProducingConfig) -> EngineConfig:
        return (self.engine or config.engine).for_scoring(self.top_k)

    def scores(self, source: str | None) -> bool:
        """Return whether it scores rollouts of a data source."""
        return not self.sources or any(fnmatchcase(source or "", each) for each in self.sources)


def teachers_of(config: Any, task: str) -> Mapping[str, TeacherSection]:
    """Return the teachers of a task, by name."""
    found = config.tasks[task].attached.get("teachers")
    return found.root if found else {}


def all_teachers(config: Any) -> dict[str, TeacherSection]:
    """Return the teachers of all tasks, with the largest `top_k` that a task asks for."""
    found: dict[str, TeacherSection] = {}
    for task in config.tasks:
        for name, section in teachers_of(config, task).items():
            top_k = max(section.top_k, found.get(name, section).top_k)
            found[name] = section.model_copy(update={"top_k": top_k})
    return found
