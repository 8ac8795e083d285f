"""A data set in a JSONL file: one problem a line.

Every line is checked once, when the file is opened, so that line 40,000 fails before the run and not during
it. Of each line only the offset is kept; rows are read when they are drawn.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from buffer.errors import DatasetError
from producer_workers.datasets.dataset import Problem

EXPECTED = (
    'expected one JSON object a line, in UTF-8: {"messages": [{"role": "user", "content": "..."}], '
    '"ground_truth": ...} or {"question": "...", "answer": ...}; "prompt" may stand for "question"'
)


class JsonlDataset:
    """Rows are the lines of a file that are not blank. Raises DatasetError (file, line, reason)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets = array("q")
        self._line_numbers = array("q")
        with self._open() as lines:
            self._identity = _identity(lines)
            self._index(lines)
        if not self._offsets:
            raise DatasetError(f"{path}: the file has no problems", hint=EXPECTED)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, row: int) -> Problem:
        """The problem of row `row`. Raises IndexError, and DatasetError if the file was changed."""
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path}: row {row} of {len(self)}")
        with self._open() as lines:
            if _identity(lines) != self._identity:
                raise DatasetError(
                    f"{self.path}: the file was changed while it was in use",
                    hint="put it back, or start a new run: draws count rows of the file as it was",
                )
            lines.seek(self._offsets[row])
            return self._parse(lines.readline(), self._line_numbers[row])

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            reason = error.strerror or str(error)
            hint = "give the path of a JSONL file that this user can read"
            raise DatasetError(f"{self.path}: cannot be opened: {reason}", hint=hint) from error

    def _index(self, lines: BinaryIO) -> None:
        offset = 0
        for number, line in enumerate(lines, start=1):
            if line.strip():
                self._parse(line, number)
                self._offsets.append(offset)
                self._line_numbers.append(number)
            offset += len(line)

    def _parse(self, line: bytes, number: int) -> Problem:
        try:
            return parse_problem(line)
        except ValueError as error:
            raise DatasetError(f"{self.path}:{number}: {error}", hint=EXPECTED) from error


def parse_problem(line: bytes) -> Problem:
    """One line as a problem. Raises ValueError with the reason. Unknown keys are kept in `extra`."""
    record = _record(line)
    source = record.pop("data_source", None)
    if not isinstance(source, str | None):
        raise ValueError(f'"data_source" is {_kind(source)}, not a string')
    extra = record.pop("extra", {})
    if not isinstance(extra, dict):
        raise ValueError(f'"extra" is {_kind(extra)}, not an object')
    messages = _take_messages(record)
    truth = record.pop("ground_truth" if "ground_truth" in record else "answer", None)
    return Problem(messages=messages, ground_truth=truth, data_source=source, extra={**record, **extra})


def _record(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8: byte {error.start + 1} of the line is {line[error.start]:#04x}"
        ) from error
    try:
        record = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, character {error.colno}") from error
    if not isinstance(record, dict):
        raise ValueError(f"the line is {_kind(record)}, not an object")
    return record


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
        raise ValueError(f'"{key}" is {_kind(prompt)}, not a string')
    if not prompt.strip():
        raise ValueError(f'"{key}" is empty')
    return [{"role": "user", "content": prompt}]


def _check_message(place: int, message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f'message {place} is not an object with a "role"')
    if "content" not in message:
        raise ValueError(f'message {place} has no "content"')


def _identity(lines: BinaryIO) -> tuple[int, int]:
    stat = os.fstat(lines.fileno())
    return stat.st_size, stat.st_mtime_ns


def _kind(value: Any) -> str:
    names = {str: "a string", list: "a list", dict: "an object", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")
