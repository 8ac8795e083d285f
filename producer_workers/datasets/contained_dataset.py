"""Read a data set in which a user's code runs: its factory, or its `record` function.

It is opened in a process of its own, so that its records, which may be objects of any kind, need
not cross. A row that hangs or ends that process is refused as any other row, by its number; the
next one opens the data set again.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from buffer.config.sections.dataset import DatasetSection, PythonDataset
from buffer.errors import ConfigError, DatasetError, UserCodeError
from buffer.model.dotted_path import load_object
from buffer.rollouts.wire_checks import check_plain
from producer_workers.datasets.dataset import Dataset, Problem
from producer_workers.user_code.border import Border
from producer_workers.user_code.cheap import is_cheap
from producer_workers.user_code.process_function import BlockingCall, ProcessFunction
from producer_workers.user_code.rules import Rules

_SECTION: TypeAdapter[DatasetSection] = TypeAdapter(DatasetSection)


class DatasetBorder(Border):
    """Its arguments are a row and an epoch, or none for the length; its result is a problem."""

    def load(self, path: str, options: Mapping[str, Any]) -> Any:
        # opened by the first call, whose limit it has
        return _Opened(options)

    def check(self, name: str, result: Any, *arguments: Any) -> dict[str, Any]:
        if isinstance(result, ConfigError):
            return {"refused": [result.message, result.hint]}
        if isinstance(result, int):
            return {"length": result}
        shown = ("messages", "tools", "ground_truth", "extra")
        check_plain("the problem", [getattr(result, key) for key in shown])
        plain = result.model_dump()
        plain["images"] = [str(each) if isinstance(each, Path) else each for each in result.images]
        return {"problem": plain}

    def result(self, plain: dict[str, Any]) -> Problem | int:
        if refused := plain.get("refused"):
            raise DatasetError(refused[0], hint=refused[1])
        if "length" in plain:
            return int(plain["length"])
        return Problem(**plain["problem"])


DATASET = DatasetBorder()


class _Opened:
    """The data set in its process."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._dataset: Dataset | None = None

    def __call__(self, *place: int) -> Problem | int | ConfigError:
        try:
            if self._dataset is None:
                self._dataset = self._open()
            return self._dataset.row(*place) if place else len(self._dataset)
        except ConfigError as error:  # a value: it names the row already
            return error

    def _open(self) -> Dataset:
        from producer_workers.datasets.open import open_here

        given = dict(self._options)
        section = _SECTION.validate_python(given.pop("section"))
        return open_here(section, Path(given.pop("problems_dir")), **given)


class ContainedDataset:
    """The data set of `section`, opened in a process. Thread-safe.

    Raises DatasetError where it cannot be opened.
    """

    def __init__(
        self,
        section: DatasetSection,
        source: str,
        problems_dir: Path,
        split: str | None,
        seed: int,
        limit_s: float,
    ) -> None:
        rules = Rules(
            what=f"the data set {source}",
            name=source,
            limit_s=limit_s,
            limit_key="[tasks.<name>.dataset] row_timeout_s",
            hint="see the record function, or the factory",
        )
        options = {
            "section": section.model_dump(mode="json"),
            "problems_dir": str(problems_dir),
            "split": split,
            "seed": seed,
        }
        call = ProcessFunction(source, f"{__name__}:DATASET", rules, options)
        self._call = BlockingCall(call)
        weakref.finalize(self, self._call.close)
        self._source = source
        try:
            self._rows = int(self._call())
        except UserCodeError as error:
            raise DatasetError(error.message, hint=error.hint) from error

    def __len__(self) -> int:
        return self._rows

    def row(self, row: int, epoch: int = 0) -> Problem:
        """See `Dataset`."""
        if not 0 <= row < self._rows:
            raise IndexError(f"{self._source}: row {row} of {self._rows}")
        try:
            problem: Problem = self._call(row, epoch)
        except UserCodeError as error:
            raise DatasetError(f"row {row}: {error.message}", hint=error.hint) from error
        return problem


def source_of_code(section: DatasetSection) -> str | None:
    """Return the user's code that reads a data set, as errors name it.

    None where there is none, or it is declared to run inline. Raises ConfigError.
    """
    factory = section.factory if isinstance(section, PythonDataset) else None
    record = getattr(section, "record", None)
    kinds = {"data set": factory, "record function": record}
    named = {spec: load_object(spec, kind=kind) for kind, spec in kinds.items() if spec}
    unsafe = [spec for spec, function in named.items() if not is_cheap(function)]
    return unsafe[0] if unsafe else None
