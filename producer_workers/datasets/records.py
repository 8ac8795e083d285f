"""Turn records of files, torch Datasets, tables or lists into problems, or explain why not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import orjson
from pydantic import ValidationError

from buffer.errors import ConfigError, DatasetError, WireError, describe, text_of
from buffer.imports import load_object
from buffer.wire.checks import check_nesting
from buffer.wire.own_copy import own_copy
from buffer.wire.sampling import StructuredOutput
from producer_workers.config.dataset import FieldName
from producer_workers.datasets.dataset import Problem
from producer_workers.datasets.row_values import HINT as STORABLE
from producer_workers.datasets.row_values import Unstorable, is_plain, plain_problem, plain_record
from producer_workers.user_code.border import user_frames

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
        return partial(_renamed, fields or {})
    change = load_object(spec, kind="record function")

    def to_problem(record: Any) -> Problem:
        changed = change(own_copy(record))  # the data set may return the same object again
        return plain_problem(changed) if isinstance(changed, Problem) else problem_of(changed)

    return to_problem


def problem_of(record: Any) -> Problem:
    """Return a record as a problem, with unknown fields in `extra`. Raises ValueError."""
    return _renamed({}, record)


def _renamed(fields: Mapping[FieldName, str], record: Any) -> Problem:
    if not isinstance(record, Mapping):
        raise ValueError(f"it is {kind_of(record)}, not an object")
    with suppress(Exception):  # nearly all rows need no change; what is wrong is raised below
        problem = _problem(_rename(fields, dict(record)))
        if is_plain(problem):
            return problem
    return _problem(_rename(fields, plain_record(record)))


def _rename(fields: Mapping[FieldName, str], record: dict[str, Any]) -> dict[str, Any]:
    if not fields:
        return record
    for name, found in fields.items():
        if found not in record:
            raise ValueError(f'there is no "{found}", which `fields` names for "{name}"')
    rest = {key: value for key, value in record.items() if key not in fields.values()}
    return rest | {name: record[found] for name, found in fields.items()}


def _problem(record: dict[str, Any]) -> Problem:
    """Return the problem of a record, which is emptied."""
    source = record.pop("data_source", None)
    if not isinstance(source, str | None):
        raise ValueError(f'"data_source" is {kind_of(source)}, not a string')
    extra = record.pop("extra", None) or {}
    if not isinstance(extra, dict):
        raise ValueError(f'"extra" is {kind_of(extra)}, not an object')
    messages = _take_messages(record)
    tools = _take_tools(record)
    structured = _take_structured(record)
    truth = record.pop("ground_truth" if "ground_truth" in record else "answer", None)
    return Problem(
        messages=messages,
        ground_truth=truth,
        data_source=source,
        tools=tools,
        structured=structured,
        extra={**record, **extra},
    )


def _take_messages(record: dict[str, Any]) -> list[dict[str, Any]]:
    if "messages" in record:
        messages = record.pop("messages")
        if not isinstance(messages, list) or not messages:
            raise ValueError('"messages" is not a list of at least one message')
        for position, message in enumerate(messages):
            _check_message(position, message)
        return messages
    key = next((name for name in ("prompt", "question") if name in record), None)
    if key is None:
        raise ValueError('there is no prompt: none of "messages", "prompt", "question"')
    prompt = record.pop(key)
    if not isinstance(prompt, str):
        raise ValueError(f'"{key}" is {kind_of(prompt)}, not a string')
    if not prompt.strip():
        raise ValueError(f'"{key}" is empty')
    return [{"role": "user", "content": prompt}]


def _check_message(position: int, message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f'message {position} is not an object with a "role"')
    if "content" not in message:
        raise ValueError(f'message {position} has no "content"')


def _take_tools(record: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = record.pop("tools", None) or None
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise ValueError('"tools" is not a list of objects')
    return tools


def _take_structured(record: dict[str, Any]) -> StructuredOutput | None:
    """Return the structure, given as an object or, for tables, as JSON text."""
    given = record.pop("structured", None) or None
    if given is None:
        return None
    try:
        value = orjson.loads(given) if isinstance(given, str) else given
        structured = StructuredOutput.model_validate(value)
        check_nesting("json_schema", [structured.json_schema])
        if structured.regex is not None:
            re.compile(structured.regex)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("structured", *first["loc"])))
        raise ValueError(f'"{where}": {first["msg"].removeprefix("Value error, ")}') from error
    except (orjson.JSONDecodeError, WireError, re.error) as error:
        raise ValueError(f'"structured": {error}') from error
    return structured


def kind_of(value: Any) -> str:
    """Return what a JSON value is, in words."""
    names = {
        str: "a string",
        list: "a list",
        dict: "an object",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


class Records(Protocol):
    """A map-style data set of torch: a number gives the same record as long as the run lives."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class RecordsDataset:
    """Rows are the records, each made a problem; the first one is tried at once.

    Errors name the records by `source`, or as `name_row` says.
    """

    def __init__(
        self,
        records: Records,
        source: str,
        to_problem: ToProblem,
        name_row: Callable[[int], str] | None = None,
    ) -> None:
        self._records = records
        self._source = source
        self._to_problem = to_problem
        self._name_row = name_row or (lambda row: f"{source}, row {row}")
        if not len(records):
            raise DatasetError(f"{source}: there are no records")
        self.row(0)

    def __len__(self) -> int:
        return len(self._records)

    def row(self, row: int, epoch: int = 0) -> Problem:
        if not 0 <= row < len(self):
            raise IndexError(f"{self._source}: row {row} of {len(self)}")
        return make_problem(
            self._to_problem, partial(self._records.__getitem__, row), self._name_row(row)
        )


def make_problem(
    to_problem: ToProblem, read: Callable[[], Any], where: str, expected: str = HINT
) -> Problem:
    """Read a record and make a problem of it that can be stored.

    Raises DatasetError with the record and the place in the user's code for every error.
    """
    try:
        return to_problem(read())
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise unusable(where, error, expected) from error


def unusable(where: str, error: BaseException, expected: str = "") -> DatasetError:
    """Return a data set's error; `expected`: the hint if no code of the user raised it."""
    if isinstance(error, Unstorable):
        return DatasetError(f"{where}: {error}", hint=STORABLE)
    reason = text_of(error) if isinstance(error, ValueError) else describe(error)
    return DatasetError(f"{where}: {reason}", hint=raised_at(user_frames(error)) or expected)


def raised_at(frames: Sequence[str]) -> str:
    """Return the hint that names places in a user's code, the innermost first, or ""."""
    return f"raised at {', called at '.join(reversed(frames))}" if frames else ""
