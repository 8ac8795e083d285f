"""From a record of somebody else's making to a problem: the field names that are understood, and
why one is refused.

A data set of anything with a length and numbered records: a torch Dataset, a table, a list.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

import orjson
from pydantic import ValidationError

from buffer.errors import DatasetError, WireError
from buffer.model.dotted_path import load_object
from buffer.model.rollout import StructuredOutput
from buffer.model.wire import check_nesting
from producer_workers.datasets.dataset import Problem

EXPECTED = (
    '{"messages": [{"role": "user", "content": "..."}], "ground_truth": ...} or {"question": "...", "answer": ...}; '
    '"prompt" may stand for "question"'
)

ToProblem = Callable[[Any], Problem]


def load_to_problem(spec: str | None) -> ToProblem:
    """What makes a problem of a record: `problem_of`, after the user's function at `spec` where
    there is one.

    That function gets the record and returns a Problem, or a dict with the fields of EXPECTED.
    """
    if spec is None:
        return problem_of
    change = load_object(spec, kind="record function")

    def to_problem(record: Any) -> Problem:
        changed = change(record)
        return changed if isinstance(changed, Problem) else problem_of(changed)

    return to_problem


def problem_of(record: Any) -> Problem:
    """A record as a problem. Raises ValueError with the reason. Unknown fields are kept in `extra`."""
    if not isinstance(record, dict):
        raise ValueError(f"it is {kind_of(record)}, not an object")
    record = dict(record)
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
        for place, message in enumerate(messages):
            _check_message(place, message)
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


def _check_message(place: int, message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f'message {place} is not an object with a "role"')
    if "content" not in message:
        raise ValueError(f'message {place} has no "content"')


def _take_tools(record: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = record.pop("tools", None) or None
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise ValueError('"tools" is not a list of objects')
    return tools


def _take_structured(record: dict[str, Any]) -> StructuredOutput | None:
    """As an object, or as JSON text: a table fills every row's object up with the fields of all
    others.
    """
    given = record.pop("structured", None) or None
    if given is None:
        return None
    try:
        structured = StructuredOutput.model_validate(
            orjson.loads(given) if isinstance(given, str) else given
        )
        check_nesting(structured.json_schema)
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
    """What a JSON value is, in words."""
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
    """What torch calls a map-style data set. The same number gives the same record for as long as
    the run lives.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class RecordsDataset:
    """Rows are the records, each made a problem. The first one is tried at once: a wrong function
    fails before the run.

    `source` says in errors where the records come from.
    """

    def __init__(self, records: Records, source: str, to_problem: ToProblem) -> None:
        self._records = records
        self._source = source
        self._to_problem = to_problem
        if not len(records):
            raise DatasetError(f"{source}: there are no records")
        self.row(0)

    def __len__(self) -> int:
        return len(self._records)

    def row(self, row: int, epoch: int = 0) -> Problem:
        if not 0 <= row < len(self):
            raise IndexError(f"{self._source}: row {row} of {len(self)}")
        return make_problem(self._to_problem, self._records[row], f"{self._source}, row {row}")


def make_problem(to_problem: ToProblem, record: Any, where: str) -> Problem:
    """The problem of a record. Raises DatasetError: whatever a user's function may raise, it says
    of which record.
    """
    try:
        return to_problem(record)
    except Exception as error:
        reason = (
            f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        )
        hint = f"expected {EXPECTED}; a `record` function may make that of it"
        raise DatasetError(f"{where}: {reason}", hint=hint) from error
