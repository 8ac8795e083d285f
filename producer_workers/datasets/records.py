"""Turn records of files, torch Datasets, tables or lists into problems, or explain why not."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from pydantic import ValidationError

from buffer.errors import ConfigError, DatasetError, Skip, describe, text_of
from buffer.failure_text import places
from buffer.imports import load_object
from buffer.readable import format_size
from buffer.wire.own_copy import own_copy
from producer_workers.config.dataset import LARGEST_ROW, FieldName
from producer_workers.datasets.dataset import Problem
from producer_workers.datasets.row_values import HINT as STORABLE
from producer_workers.datasets.row_values import (
    Unstorable,
    byte_count,
    is_picture,
    plain_problem,
    plain_record,
)
from producer_workers.user_code.failure import is_of_user, user_trace

EXPECTED = (
    '{"messages": [{"role": "user", "content": "..."}], "ground_truth": ...} '
    'or {"question": "...", "answer": ...}; "prompt" may replace "question"'
)

HINT = f"expected {EXPECTED}; a `record` function may convert the record"

ToProblem = Callable[[Any], Problem]


def load_to_problem(spec: str | None, fields: Mapping[FieldName, str] | None = None) -> ToProblem:
    """Return `problem_of`, after the function at `spec` if any (record in, Problem or dict out).

    `fields`: the record's own names for fields of EXPECTED.
    """
    if spec is None:
        return partial(problem_of, fields=fields)
    change = load_object(spec, kind="record function")

    def to_problem(record: Any) -> Problem:
        changed = change(own_copy(record))  # the data set may return the same object again
        return plain_problem(changed) if isinstance(changed, Problem) else problem_of(changed)

    return to_problem


def without_nulls(to_problem: ToProblem) -> ToProblem:
    """Return `to_problem` for rows of a table, all of which have the keys of any row, as null.

    They are left out of messages and tools, which the model reads.
    """

    def left_out(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: left_out(each) for key, each in value.items() if each is not None}
        return [left_out(each) for each in value] if isinstance(value, list) else value

    def of_table(record: Any) -> Problem:
        problem = to_problem(record)
        read = {"messages": left_out(problem.messages), "tools": left_out(problem.tools)}
        return problem.model_copy(update=read)

    return of_table


def problem_of(record: Any, fields: Mapping[FieldName, str] | None = None) -> Problem:
    """Return a record as a problem, with unknown fields in `extra`. Raises ValueError."""
    if not isinstance(record, Mapping):
        raise ValueError(f"it is a {type(record).__name__}, not an object")
    values = plain_record(record)
    fields = fields or {}
    for name, found in fields.items():
        if found not in values:
            raise ValueError(f'there is no "{found}", which `fields` names for "{name}"')
    rest = {key: value for key, value in values.items() if key not in fields.values()}
    rest |= {name: values[found] for name, found in fields.items()}
    given = {key: rest.pop(key, None) or None for key in ("tools", "structured")}
    given["data_source"] = rest.pop("data_source", None)
    key = next((name for name in ("messages", "prompt", "question") if name in rest), None)
    if key is None:
        raise ValueError('there is no prompt: none of "messages", "prompt", "question"')
    asked = rest.pop(key)
    if key != "messages":
        if not isinstance(asked, str) or not asked.strip():
            raise ValueError(f'"{key}" is not a text, or empty')
        asked = [{"role": "user", "content": asked}]
    given["messages"] = asked
    truth = rest.pop("ground_truth" if "ground_truth" in rest else "answer", None)
    extra = rest.pop("extra", None) or {}
    if not isinstance(extra, dict):
        raise ValueError(f'"extra" is a {type(extra).__name__}, not an object')
    try:
        return Problem(ground_truth=truth, extra={**rest, **extra}, **given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f'"{where}": {first["msg"].removeprefix("Value error, ")}') from error


def without_images(to_problem: ToProblem) -> ToProblem:
    """Return `to_problem` for a data set without images: it refuses a message with one."""

    def to_text_problem(record: Any) -> Problem:
        problem = to_problem(record)
        shown = [*parts_of(problem.messages), *problem.extra.values()]
        if any(is_image(part) or is_picture(part) for part in shown):
            raise ValueError("it has an image; add [tasks.<name>.dataset.images] to allow images")
        return problem

    return to_text_problem


def parts_of(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the parts of all messages, texts included."""
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            yield {"type": "text", "text": content}
        elif isinstance(content, list):
            yield from (part for part in content if isinstance(part, dict))


def is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


class Records(Protocol):
    """A map-style data set of torch: a number gives the same record as long as the run lives."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class RecordsDataset:
    """Rows are the records, each made a problem; the first one is tried at once.

    Errors name the records by `source`, or as `name_row` says. `largest`: bytes of a record.
    """

    def __init__(
        self,
        records: Records,
        source: str,
        to_problem: ToProblem,
        name_row: Callable[[int], str] | None = None,
        largest: int = LARGEST_ROW,
    ) -> None:
        self._records = records
        self._source = source
        self._to_problem = to_problem
        self._largest = largest
        self._name_row = name_row or (lambda row: f"{source}, row {row}")
        if not len(records):
            raise DatasetError(f"{source}: there are no records")
        self.try_row(0)

    def __len__(self) -> int:
        return len(self._records)

    def try_row(self, row: int) -> None:
        """Raise DatasetError if a row cannot be used; it may be skipped."""
        with suppress(Skip):
            self.row(row)

    def row(self, row: int, epoch: int = 0) -> Problem:
        if not 0 <= row < len(self):
            raise IndexError(f"{self._source}: row {row} of {len(self)}")
        read = partial(self._records.__getitem__, row)
        return make_problem(self._to_problem, read, self._name_row(row), self._largest)


class StreamDataset:
    """Row n is the n-th record of each pass over a torch DataLoader or any iterable. Thread-safe.

    It needs `len()` or `rows`. A restarted producer iterates again and skips what was drawn (I3),
    so every pass must have a fixed order: a loader's generator is seeded, `set_epoch` is called,
    and a loader that shuffles without a generator is refused. Iteration begins at the first draw.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        source: str,
        to_problem: ToProblem,
        *,
        seed: int = 0,
        rows: int | None = None,
        largest: int = LARGEST_ROW,
    ) -> None:
        self._iterable = iterable
        self._source = source
        self._to_problem = to_problem
        self._seed = seed
        self._largest = largest
        # the length of a DataLoader itself counts batches
        counted: Any = getattr(iterable, "dataset", iterable)
        try:
            self._rows = len(counted) if rows is None else rows
        except TypeError as error:
            hint = "give it a __len__, or set `rows` to the number of records of one pass"
            raise DatasetError(
                f"{source}: {type(counted).__name__} has no length", hint=hint
            ) from error
        shuffles = type(getattr(iterable, "sampler", None)).__name__ == "RandomSampler"
        if shuffles and getattr(iterable, "generator", None) is None:
            raise DatasetError(
                f"{source}: the loader shuffles anew each time, so a restart would skip and "
                "repeat prompts",
                hint="use DataLoader(..., generator=torch.Generator()), "
                "which is seeded by the run's seed and the epoch",
            )
        self._lock = threading.Lock()
        self._epoch = -1
        self._next = 0
        self._records: Iterator[Any] = iter(())
        # a producer may draw more than it has room to start
        self._kept: deque[Any] = deque(maxlen=1024)

    def __len__(self) -> int:
        return self._rows

    def row(self, row: int, epoch: int = 0) -> Problem:
        """Return record `row` of pass `epoch`; one long past costs a pass from the start."""
        if not 0 <= row < self._rows:
            raise IndexError(f"{self._source}: row {row} of {self._rows}")
        where = f"{self._source}, epoch {epoch}, record {row}"
        return make_problem(self._to_problem, partial(self._find, row, epoch), where, self._largest)

    def _find(self, row: int, epoch: int) -> Any:
        with self._lock:
            try:
                if epoch != self._epoch or row < self._next - len(self._kept):
                    self._begin(epoch)
                while self._next <= row:
                    self._kept.append(next(self._records))
                    self._next += 1
                return self._kept[row - self._next]
            except StopIteration:
                self._epoch = -1
                hint = "its length must be the number of records in every pass"
                raise DatasetError(
                    f"{self._source}: ended after {self._next} of {self._rows} records", hint=hint
                ) from None
            except BaseException:
                self._epoch = -1  # a generator that raised has ended
                raise

    def _begin(self, epoch: int) -> None:
        for part in (
            self._iterable,
            getattr(self._iterable, "sampler", None),
            getattr(self._iterable, "dataset", None),
        ):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        generator = getattr(self._iterable, "generator", None)
        if generator is not None:
            generator.manual_seed(self._seed * 1_000_003 + epoch)  # differs for each run and epoch
        self._kept.clear()
        self._epoch = epoch
        self._next = 0
        # a loader may give lists of records
        self._records = (
            record
            for item in self._iterable
            for record in (item if isinstance(item, list) else (item,))
        )


def make_problem(
    to_problem: ToProblem, read: Callable[[], Any], where: str, largest: int = LARGEST_ROW
) -> Problem:
    """Read a record of at most `largest` bytes and make a problem of it that can be stored.

    Raises Skip, and DatasetError with the record and the place in the user's code for every error.
    """
    try:
        record = read()
        check_size(byte_count(record, largest), largest)
        return to_problem(record)
    except (ConfigError, KeyboardInterrupt, Skip):
        raise
    except BaseException as error:
        raise unusable(where, error, HINT) from error


def check_size(size: int, largest: int) -> None:
    if size > largest:
        raise ValueError(f"the row has more than {format_size(largest)}, too much for a prompt")


def unusable(where: str, error: BaseException, expected: str = "") -> DatasetError:
    """Return a data set's error; `expected`: the hint if no code of the user raised it."""
    if isinstance(error, Unstorable):
        return DatasetError(f"{where}: {error}", hint=STORABLE)
    reason = text_of(error) if isinstance(error, ValueError) else describe(error)
    return DatasetError(f"{where}: {reason}", hint=raised_at(error) or expected)


def raised_at(error: BaseException) -> str:
    """Return the hint that names the user's lines that raised, the innermost first, or ""."""
    found = [place for place in places(user_trace(error)) if is_of_user(place)]
    return f"raised at {', called at '.join(reversed(found))}" if found else ""
