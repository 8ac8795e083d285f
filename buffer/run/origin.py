"""What the draws of a run mean: the data set, seed and tokenizer that make a prompt of a number.

The run records them when it is created; every process with a config compares first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

FIELD = "origin"
"""The field of the run's `meta` that holds the record as JSON."""


class TaskOrigin(BaseModel):
    model_config = ConfigDict(frozen=True)

    data: str | None = None
    """fingerprint of the data set; None if no process has seen it"""
    source: str | None = None
    """data set on the Hub, as NAME@COMMIT"""
    eval_of: str | None = None
    shuffle: bool = True
    prompt_repeat_k: int = 1

    def contradictions(self, name: str, other: TaskOrigin) -> Iterator[str]:
        if _differ(self.source, other.source):
            yield _other_source(f"[tasks.{name}.dataset]", self.source, other.source)
        elif _differ(self.data, other.data):
            yield f"[tasks.{name}.dataset] is not the data set that the run draws from"
        if self.shuffle != other.shuffle:
            yield (
                f"[tasks.{name}] shuffle is {str(other.shuffle).lower()}: prompts get another order"
            )
        if self.eval_of != other.eval_of:
            yield f"[tasks.{name}] eval_of is {other.eval_of!r}, it was {self.eval_of!r}"


class Origin(BaseModel):
    """What a run draws from. Fingerprints are None if no process has seen the files."""

    model_config = ConfigDict(frozen=True)

    seed: int = 0
    source: str | None = None
    """model on the Hub, as NAME@COMMIT"""
    tokenizer: str | None = None
    """fingerprint of the tokenizer and its chat template"""
    architecture: str | None = None
    """fingerprint of the model's shape"""
    tasks: dict[str, TaskOrigin] = {}
    """every task that the run ever had"""
    models: list[str] = []
    """models of judges on the Hub, as NAME@COMMIT; a config may name others at any time"""

    @classmethod
    def from_meta(cls, meta: Mapping[str, str]) -> Origin | None:
        """Return the record in a run's meta hash; None if it is missing or cannot be read."""
        try:
            return cls.model_validate_json(meta[FIELD])
        except (KeyError, ValidationError):
            return None

    @property
    def commits(self) -> dict[str, str]:
        """Return the commit of every repository of the Hub."""
        sources = [*self.models, self.source, *(task.source for task in self.tasks.values())]
        pairs = (source.partition("@") for source in sources if source)
        return {name: commit for name, _, commit in pairs}

    def contradictions(self, other: Origin) -> Iterator[str]:
        """Yield why a process with `other` would break the guarantees of a run with this record."""
        if other.seed != self.seed:
            yield f"[run] seed is {other.seed}, the run was made with {self.seed}"
        if _differ(self.source, other.source):
            yield _other_source("[policy] model", self.source, other.source)
        if _differ(self.tokenizer, other.tokenizer):
            yield "[policy] model has another tokenizer or chat template"
        if _differ(self.architecture, other.architecture):
            yield "[policy] model has another architecture or size"
        gone: dict[str | None, str] = {
            known.data: name
            for name, known in reversed(self.tasks.items())
            if name not in other.tasks and known.data and known.eval_of is None
        }
        for name, task in other.tasks.items():
            if name in self.tasks:
                yield from self.tasks[name].contradictions(name, task)
            elif task.eval_of is None and (former := gone.get(task.data)):
                yield f"task {former} is named {name} now, and would draw the same prompts again"

    def adopting(self, other: Origin, *, draws: bool) -> Origin:
        """Add what `other` has. Group sizes are those of the process that draws the prompts."""
        tasks = dict(self.tasks)
        for name, task in other.tasks.items():
            known = self.tasks.get(name, task)
            size = task.prompt_repeat_k if draws else known.prompt_repeat_k
            update = {
                "data": task.data if known.data is None else known.data,
                "source": known.source or task.source,
                "prompt_repeat_k": size,
            }
            tasks[name] = task.model_copy(update=update)
        return Origin(
            seed=self.seed,
            source=self.source or other.source,
            tokenizer=self.tokenizer or other.tokenizer,
            architecture=self.architecture or other.architecture,
            tasks=tasks,
            models=sorted({*self.models, *other.models}),
        )

    def resized(self, other: Origin) -> dict[str, str]:
        """Return a sentence for each task whose group size differs in `other`."""
        return {
            name: f"tasks.{name}.prompt_repeat_k: {known.prompt_repeat_k} → {task.prompt_repeat_k}"
            for name, task in other.tasks.items()
            if (known := self.tasks.get(name)) and known.prompt_repeat_k != task.prompt_repeat_k
        }


def _other_source(section: str, before: str | None, after: str | None) -> str:
    return f"{section} is {after}, the run was made with {before}: set revision to that commit"


def _differ(before: str | None, after: str | None) -> bool:
    return before is not None and after is not None and before != after
