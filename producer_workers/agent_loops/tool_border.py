"""The border of tools: functions with annotated arguments, whose results are text for a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import ValidationError, validate_call

from buffer.errors import text_of
from producer_workers.user_code.border import Border

LONGEST_RESULT = 8192
"""Characters of a result that the model gets to see."""


class ToolBorder(Border):
    """Its argument is the arguments of a tool by name, as the model gave them."""

    def prepare(self, function: Any, options: Mapping[str, Any]) -> Any:
        return validate_call(function)

    def call(self, function: Any, *arguments: Any) -> Any:
        return function(**arguments[0])

    def check(self, name: str, result: Any, *arguments: Any) -> str:
        text = result if isinstance(result, str) else orjson.dumps(result, default=str).decode()
        return text[:LONGEST_RESULT].encode(errors="replace").decode()

    def told(self, error: BaseException) -> str:
        if isinstance(error, ValidationError):
            faults = [
                f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
                for fault in error.errors(include_url=False)
            ]
            return f"the arguments of {error.title} do not fit: {'; '.join(faults)}"
        text = text_of(error)
        name = type(error).__name__
        return f"{name}: {text}"[:LONGEST_RESULT] if text else name


TOOL = ToolBorder()
