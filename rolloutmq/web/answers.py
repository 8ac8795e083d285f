"""Answers to browsers: documents and errors as JSON, and values read from a query string."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from buffer.errors import AccountError, ConfigError, RolloutMQError, RunNotFound, StoreUnavailable
from rolloutmq.web.access import NoToken, ReadOnly

_STATUS = {ConfigError: 400, RunNotFound: 404, AccountError: 404, StoreUnavailable: 503}


def answer(document: Any) -> Response:
    """Return a document as JSON."""
    return Response(encoded(document), media_type="application/json")


def encoded(document: Any) -> bytes:
    """Return a document as JSON bytes; keys may be numbers, NaN becomes null."""
    return orjson.dumps(document, option=orjson.OPT_NON_STR_KEYS)


def json_in(text: str) -> Any:
    """Return the JSON value of a parameter."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"not valid JSON: {error}", hint='for example {"status": "completed"}'
        ) from error


def number_in(text: str, most: int) -> int:
    """Return the number of a parameter, from 1 to `most`."""
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ConfigError(f"{text[:20]!r} is not a number from 1 to {most}")
    return int(text)


def _refuse(request: Request, error: Exception) -> Response:
    document = {
        "error": "this needs a token",
        "hint": "open the address that `rolloutmq web` printed: it contains the token",
    }
    return JSONResponse(document, status_code=401)


def _refuse_to_act(request: Request, error: Exception) -> Response:
    document = {
        "error": "this page only reads",
        "hint": "`rolloutmq web` was started with --read-only",
    }
    return JSONResponse(document, status_code=403)


def _report(request: Request, error: RolloutMQError) -> Response:
    code = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 409)
    return JSONResponse({"error": error.message, "hint": error.hint}, status_code=code)


ERRORS: dict[Any, Any] = {NoToken: _refuse, ReadOnly: _refuse_to_act, RolloutMQError: _report}
"""What is answered to each error that a route raises."""
