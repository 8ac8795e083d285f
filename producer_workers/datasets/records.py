"""Turn records of any origin into problems, or explain why one is refused.

Records may come from a file, or from anything with a length and numbered records: a torch Dataset,
a table, a list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import orjson
from pydantic import ValidationError

from buffer.config.sections.dataset import FieldName
from buffer.errors import DatasetError, WireError, text_of
from buffer.model.dotted_path import load_object
from buffer.rollouts.own_copy import own_copy
from buffer.rollouts.sampling import StructuredOutput
from buffer.rollouts.wire_checks import check_nesting
from producer_workers.datasets.dataset import Problem

EXPECTED = (
    '{"messages": [{"role": "user", "content": "..."}], "ground_truth": ...} '
    'or {"question": "...", "answer": ...}; "prompt" may replace "question"'
)

ToProblem = Callable[[Any], Problem]


def load_to_problem(spec: str | None, fields: Mapping[FieldName, str] | None = None) -> ToProblem:
    """Return what makes a problem of a record: `problem_of`, after the function at `spec` if any.

    That function gets the record and returns a Problem, or a dict with the fields of EXPECTED.
    `fields`: the names that fields of EXPECTED have in the record.
    """
    if spec is None:
        return partial(_renamed, fields) if fields else problem_of
    change = load_object(spec, kind="record function")

    def to_problem(record: Any) -> Problem:
        changed = change(own_copy(record))  # the data set may return the same object again
        return changed if isinstance(changed, Problem) else problem_of(changed)

    return to_problem


def _renamed(fields: Mapping[FieldName, str], record: Any) -> Problem:
    if not isinstance(record, dict):
        return problem_of(record)
    for name, found in fields.items():
        if found not in record:
            raise ValueError(f'there is no "{found}", which `fields` names for "{name}"')
    rest = {key: value for key, value in record.items() if key not in fields.values()}
    return problem_of(rest | {name: record[found] for name, found in fields.items()})


def problem_of(record: Any) -> Problem:
    """Return a record as a problem. Unknown fields are kept in `extra`.

    Raises ValueError with the reason.
    """
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
    try:
        check_nesting("the record", [messages, tools, truth, record, extra])
    except WireError as error:
        raise ValueError(str(error)) from error
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
    """Return the structure, given as an object or as JSON text.

    JSON text is for tables, which fill every row's object up with the fields of all others.
    """
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
    """What torch calls a map-style data set.

    A number gives the same record for as long as the run lives.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class RecordsDataset:
    """Rows are the records, each made a problem.

    The first one is tried at once, so that a wrong function fails before the run. Errors name the
    records by `source`.
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
    """Make a problem of a record.

    Raises DatasetError that names the record, for every error of a user's function.
    """
    try:
        return to_problem(record)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = f"{kind}{text_of(error)}"
        hint = f"expected {EXPECTED}; a `record` function may convert the record"
        raise DatasetError(f"{where}: {reason}", hint=hint) from error
