"""[tasks.<name>.teachers]: the models that score the tokens of a task's rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, RootModel

from buffer.errors import HubError
from producer_workers.config.attached_judge import AttachedJudge, ColumnJudge, OwnEngine
from producer_workers.config.engine import HttpConfig
from producer_workers.hub import Repository
from rolloutmq.extensions.teacher.settings import TeacherSection, all_teachers, teachers_of

if TYPE_CHECKING:
    from producer_workers.config.producing import ProducingConfig

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]


class Teachers(RootModel[dict[Name, TeacherSection]], AttachedJudge):
    """[tasks.<name>.teachers]: the teachers of a task, by name."""

    @property
    def weights(self) -> Mapping[str, float]:
        return {name: section.weight for name, section in self.root.items()}

    @property
    def repositories(self) -> list[Repository]:
        return [each.repository for each in self.root.values() if each.repository]

    def pinned(self, commits: Mapping[Repository, Repository]) -> Self:
        def pin(section: TeacherSection) -> TeacherSection:
            if section.repository is None:
                return section
            return section.model_copy(update={"revision": commits[section.repository].revision})

        return type(self)({name: pin(section) for name, section in self.root.items()})

    @classmethod
    def rules(cls, config: Any) -> Iterator[str]:
        from rolloutmq.extensions.teacher import rules

        yield from rules.violations(config)

    @classmethod
    def checks(cls, config: ProducingConfig) -> Mapping[str, Callable[[], str]]:
        return {
            f"teacher {name}": partial(_check, name, section, config)
            for name, section in all_teachers(config).items()
            if section.model
        }

    @classmethod
    def engines(cls, config: ProducingConfig) -> Mapping[str, OwnEngine]:
        return {
            f"teacher {name}": OwnEngine(section.settings(config), partial(section.folder, config))
            for name, section in all_teachers(config).items()
        }

    @classmethod
    def judges(cls, config: ProducingConfig, tasks: Sequence[str]) -> Mapping[str, ColumnJudge]:
        from rolloutmq.extensions.teacher.judge import make_judges

        return make_judges(config, {name: teachers_of(config, name) for name in tasks})


def _check(name: str, section: TeacherSection, config: ProducingConfig) -> str:
    """Compare a teacher with the student, as far as their folders are here."""
    from producer_workers.engines.model_folder import check_model_folder
    from rolloutmq.extensions.teacher.model import check_same_tokens

    folder = section.folder(config)
    if not isinstance(section.settings(config), HttpConfig):
        check_model_folder(folder)
    with suppress(HubError):
        if config.model_folder.is_dir():
            check_same_tokens(name, config.model_folder, folder)
    return f"teacher {name}: {folder}"
