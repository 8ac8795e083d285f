"""The endpoint that agents speak to: on a loopback port of its own, for as long as one group is made.

Who asks is known by the token of a session, which is random, stands in place of the API key, and ends with the group.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from types import TracebackType
from typing import Any

import orjson
from aiohttp import web
from pydantic import ValidationError

from buffer.errors import ConfigError
from producer_workers.agent_loops.gateway.chat_completion import ChatRequest
from producer_workers.agent_loops.gateway.dialect import Asked, refusal
from producer_workers.agent_loops.gateway.session import Session, SessionClosed, Turn
from producer_workers.agent_loops.gateway.text_completion import TextRequest
from producer_workers.engines.base import EngineDeadError, GenerationError
from producer_workers.tokenizer import Tokenizer, aside

log = logging.getLogger("rolloutmq.worker")

LARGEST_REQUEST = 64 * 2**20
"""Bytes of one request: a whole conversation."""


class Endpoint:
    """`async with Endpoint(tokenizer) as endpoint`: `url` is what an OpenAI client calls its base URL.

    failure: what the engine died of, for whoever waits for an agent.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._sessions: dict[str, Session] = {}
        self.url, self.failure = "", None

    url: str
    failure: EngineDeadError | None

    def admit(self, session: Session) -> str:
        """The key under which an agent may use a session."""
        key = f"rmq-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    async def __aenter__(self) -> Endpoint:
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._complete),
                web.get("/v1/models", self._models),
                web.route("*", "/{path:.*}", _unknown),
            ],
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    def _session(self, request: web.Request) -> Session | None:
        said = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        known = [session for key, session in self._sessions.items() if hmac.compare_digest(key.encode(), said)]
        return known[0] if known else None

    async def _models(self, request: web.Request) -> web.Response:
        if self._session(request) is None:
            return _refuse(401, "this key belongs to no session", "invalid_api_key")
        return web.json_response(
            {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "rolloutmq"}]}
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, ChatRequest)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, TextRequest)

    async def _serve(self, request: web.Request, kind: type[ChatRequest | TextRequest]) -> web.StreamResponse:
        session = self._session(request)
        if session is None:
            return _refuse(401, "this key belongs to no session", "invalid_api_key")
        try:
            asked = kind.model_validate_json(await request.read())
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
            return _refuse(400, f"this request cannot be recorded for training: {wrong}", "unsupported")
        try:
            turn = await asked.ask(session)
        except SessionClosed as error:
            interrupted = session.interrupted.is_set()
            return _refuse(
                503 if interrupted else 400, str(error), "interrupted" if interrupted else "context_length_exceeded"
            )
        except (ConfigError, GenerationError) as error:
            return _refuse(400, str(error), "refused")
        except EngineDeadError as error:
            self.failure = error
            session.interrupted.set()
            return _refuse(503, "the engine died", "interrupted")
        return await self._reply(request, asked, turn)

    async def _reply(self, request: web.Request, asked: Asked, turn: Turn) -> web.StreamResponse:
        pieces = await aside(self._pieces, turn) if asked.wants_logprobs else []
        name = secrets.token_hex(8)
        if not asked.stream:
            return web.json_response(asked.answer(turn, name, pieces))
        return await _stream(request, list(asked.chunks(turn, name, pieces)))

    def _pieces(self, turn: Turn) -> list[str]:
        """The text of each token."""
        return [str(self._tokenizer.decode([token])) for token in turn.made.token_ids.tolist()]


async def _stream(request: web.Request, chunks: list[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def _unknown(request: web.Request) -> web.Response:
    known = "POST /v1/chat/completions and /v1/completions, GET /v1/models"
    hint = " (the Responses API keeps conversations to itself: let the agent use chat completions)"
    message = f"{request.method} {request.path} cannot be recorded for training; there are {known}"
    return _refuse(404, message + (hint if "/responses" in request.path else ""), "unsupported")


def _refuse(status: int, message: str, code: str) -> web.Response:
    # a client that would try again is told not to: what was refused now is refused then
    headers = {"x-should-retry": "false"}
    return web.json_response(refusal(message, code), status=status, headers=headers)
