"""Serve the OpenAI API to the agents of one group; a session's API key ends with the group."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import ValidationError

from buffer.errors import ConfigError
from producer_workers.agent_loops.tokenizer import Tokenizer, in_tokenizer_thread
from producer_workers.engines.base import EngineDeadError, GenerationError
from producer_workers.gateway.openai_api import ChatRequest, TextRequest
from producer_workers.gateway.session import ContextFull, SampledTurn, Session, SessionClosed

log = logging.getLogger("rolloutmq.worker")

LARGEST_REQUEST = 64 * 2**20  # bytes; a request carries a whole conversation

MOST_FAULTS = 8  # in an error message; a request may have a million
LONGEST_REFUSAL = 4096  # characters of an error message

# An escape of JSON: a surrogate pair, half of one (the group), or any other.
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(\\u[dD][89a-fA-F][\da-fA-F]{2})|\\."
)


AnyRequest = ChatRequest | TextRequest


class Endpoint:
    """The endpoint of one group. `failure` is the error that ended the engine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._sessions: dict[str, Session] = {}
        self._answering: dict[str, set[asyncio.Task[Any]]] = {}
        self.url = ""
        self.failure: EngineDeadError | None = None

    def admit(self, session: Session) -> str:
        key = f"rmq-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        self._answering[key] = set()
        return key

    def dismiss(self, key: str) -> None:
        """End an agent's key, and cancel its open requests."""
        del self._sessions[key]
        for request in self._answering.pop(key):
            request.cancel()

    async def __aenter__(self) -> Endpoint:
        app = web.Application(client_max_size=LARGEST_REQUEST, middlewares=[_errors_as_openai])
        app.add_routes(
            [
                web.post("/v1/chat/completions", partial(self._serve, ChatRequest)),
                web.post("/v1/completions", partial(self._serve, TextRequest)),
                web.get("/v1/models", self._models),
                web.route("*", "/{path:.*}", _unknown),
            ],
        )
        # A request whose agent has gone is cancelled, so that the engine stops sampling for it.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def _key(self, request: web.Request) -> str | None:
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        token = given.strip().encode(errors="surrogateescape") if kind.lower() == "bearer" else b""
        for key in self._sessions:
            # In constant time: another process of this machine may guess keys.
            if hmac.compare_digest(key.encode(), token):
                return key
        return None

    async def _models(self, request: web.Request) -> web.Response:
        if self._key(request) is None:
            return _refuse(401, "this key belongs to no session", "invalid_api_key")
        model = {"id": "policy", "object": "model", "owned_by": "rolloutmq"}
        return web.json_response({"object": "list", "data": [model]})

    async def _serve(self, kind: type[AnyRequest], request: web.Request) -> web.StreamResponse:
        key = self._key(request)
        answering = asyncio.current_task()
        if key is None:
            return _refuse(
                401, "this key belongs to no session, or to one that has ended", "invalid_api_key"
            )
        assert answering is not None
        requests = self._answering[key]
        requests.add(answering)
        try:
            return await self._answer(request, kind, self._sessions[key])
        finally:
            requests.discard(answering)

    async def _answer(
        self, request: web.Request, kind: type[AnyRequest], session: Session
    ) -> web.StreamResponse:
        body = await request.read()
        try:
            asked = _parse(kind, body)
        except ValidationError as error:
            return _refuse_fields(error)
        try:
            turn = await asked.ask(session)
        except (SessionClosed, ContextFull) as error:
            if isinstance(error, SessionClosed) and session.interrupted.is_set():
                return _refuse(503, str(error), "interrupted")
            return _refuse(400, str(error), "context_length_exceeded")
        except (ConfigError, GenerationError) as error:
            return _refuse(400, str(error), "refused")
        except EngineDeadError as error:
            self.failure = error
            session.interrupted.set()
            return _refuse(503, "the engine died", "interrupted")
        pieces = await in_tokenizer_thread(self._pieces, turn) if asked.wants_logprobs else []
        name = secrets.token_hex(8)
        if not asked.stream:
            return web.json_response(asked.answer(turn, name, pieces))
        return await _stream(request, asked.chunks(turn, name, pieces))

    def _pieces(self, turn: SampledTurn) -> list[str]:
        return [str(self._tokenizer.decode([token])) for token in turn.made.token_ids.tolist()]


def _parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """Return the request in `body`, with halves of surrogate pairs replaced by U+FFFD."""
    try:
        return kind.model_validate_json(body)
    except ValidationError:
        text = body.decode(errors="replace")
        whole = _ESCAPE.sub(lambda found: "\ufffd" if found[1] else found[0], text).encode()
        if whole == body:
            raise
        return kind.model_validate_json(whole)


async def _stream(request: web.Request, chunks: Iterator[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    for chunk in chunks:
        await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def _unknown(request: web.Request) -> web.Response:
    known = "POST /v1/chat/completions and /v1/completions, GET /v1/models"
    message = f"{request.method} {request.path} cannot be recorded for training; there are {known}"
    if "/responses" in request.path:  # that API keeps the conversation on the server
        message += " (let the agent use chat completions instead of the Responses API)"
    return _refuse(404, message, "unsupported")


@web.middleware
async def _errors_as_openai(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return errors in the form that OpenAI's clients parse."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return _refuse(413, f"a request has {LARGEST_REQUEST} bytes at most", "request_too_large")
    except web.HTTPException as error:
        return _refuse(error.status, error.reason, "bad_request")
    except web.RequestPayloadError as error:  # a body that does not fit its headers
        return _refuse(400, str(error), "bad_request")
    except OSError:  # the agent has gone
        raise
    except Exception as error:  # a fault of this program or of a tokenizer; the agent gets it
        log.exception("a request of an agent failed", extra={"path": request.path})
        return _refuse(500, f"{type(error).__name__}: {error}", "internal_error")


def _refuse_fields(error: ValidationError) -> web.Response:
    wrong = error.errors(include_url=False, include_input=False)
    faults = [
        ": ".join(filter(None, [".".join(map(str, fault["loc"])), fault["msg"]]))
        for fault in wrong[:MOST_FAULTS]
    ]
    message = f"this request cannot be recorded for training: {'; '.join(faults)}"
    field = str(wrong[0]["loc"][0]) if wrong[0]["loc"] else None
    return _refuse(400, message, "unsupported", field)


def _refuse(status: int, message: str, code: str, field: str | None = None) -> web.Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message[:LONGEST_REFUSAL], "type": kind, "code": code, "param": field}
    # Clients would retry, and be refused again.
    headers = {"x-should-retry": "false"}
    return web.json_response({"error": error}, status=status, headers=headers)
