"""[tasks.<name>.teachers.<teacher>]: models that score the tokens of finished rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import Field

from buffer.config.section import Section
from producer_workers.config.engine import EngineConfig
from producer_workers.hub import Repository, repository


class TeacherSection(Section):
    """[tasks.<name>.teachers.<teacher>]: a model that scores the tokens of finished rollouts.

    It needs the tokenizer of the run's model, and workers of its own (`rolloutmq worker CONFIG
    --teacher NAME`). Teachers of one name are the same in all tasks: model, revision, engine and
    workers must agree.
    """

    model: Path | None = None
    """a Hugging Face folder, or the id of a model on the Hub; default: the model that the run
    starts from, as a frozen reference
    """
    revision: str | None = None
    """branch, tag or commit of a model on the Hub; default: the newest commit, kept by the run"""
    weight: float = Field(1.0, ge=0, le=1e6)
    """weight of its logprobs in the loss"""
    sources: list[str] = Field(default_factory=list)
    """patterns of the data sources whose rollouts it scores; default: all"""
    top_k: int = Field(0, ge=0, le=1024)
    """most probable tokens of which it also gives id and logprob at every position, 8 bytes each"""
    workers: int = Field(1, ge=1, le=1024)
    """processes that `rolloutmq run` starts for it"""
    engine: EngineConfig | None = None
    """its engine, with all keys of [engine]; default: the values of [engine]"""

    def problems(self) -> Iterator[str]:
        if self.revision and self.repository is None:
            yield f"revision = {self.revision} is for a model on the Hub: {self.model} is none"

    @property
    def repository(self) -> Repository | None:
        """Return the repository of the model; None for a folder."""
        return repository(self.model, self.revision, "model")

    @property
    def pin(self) -> str | None:
        """Return the repository as NAME@COMMIT; None for a folder or another revision."""
        return self.repository and self.repository.pin

    def scores(self, source: str | None) -> bool:
        """Return whether it scores rollouts of a data source."""
        return not self.sources or any(fnmatchcase(source or "", each) for each in self.sources)
