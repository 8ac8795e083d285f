"""Serve the dialects of agents on one port per worker; a key decides the session."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import re
import resource
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Self, TypeVar
from weakref import WeakValueDictionary

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import ValidationError

from buffer.errors import ConfigError, Fenced, WireError
from producer_workers.agent_loops.tokenizer import in_thread_of_texts, in_tokenizer_thread
from producer_workers.engines.base import EngineDeadError, GenerationError
from rolloutmq.extensions.gateway.agent_sessions import AgentSessions
from rolloutmq.extensions.gateway.agents import BY_HEADER, MODEL
from rolloutmq.extensions.gateway.dialects.anthropic import CountRequest, MessagesRequest
from rolloutmq.extensions.gateway.dialects.dialect import AgentRequest
from rolloutmq.extensions.gateway.dialects.openai_chat import ChatRequest, TextRequest
from rolloutmq.extensions.gateway.dialects.openai_responses import ResponsesRequest
from rolloutmq.extensions.gateway.dialects.vllm_tokens import GenerateRequest
from rolloutmq.extensions.gateway.guests import LARGEST_REQUEST, Guest, Refusal, keep
from rolloutmq.extensions.gateway.known_messages import Known, split
from rolloutmq.extensions.gateway.reply import Reply
from rolloutmq.extensions.gateway.section import GatewaySection
from rolloutmq.extensions.gateway.session import ContextFull, Session, SessionClosed
from rolloutmq.extensions.gateway.turn import Ask

log = logging.getLogger("rolloutmq.worker")

T = TypeVar("T")

QUIET_S = 120.0  # the longest that a connection is silent, or sends one body

OPEN_FILES = 65_536  # of a worker: agents have several each, and others may connect without a key

# Commas in a request, and four times its brackets: while it is parsed, all other threads wait.
MOST_VALUES = 2**20

REPLY = web.RequestKey("reply", Reply)  # of a request

# An escape of JSON: a surrogate pair, half of one (the group; read as U+FFFD), or any other.
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(\\u[dD][89a-fA-F][\da-fA-F]{2})|\\."
)


DIALECTS: dict[str, type[AgentRequest]] = {
    kind.path: kind
    for kind in (
        ChatRequest,
        TextRequest,
        ResponsesRequest,
        MessagesRequest,
        CountRequest,
        GenerateRequest,
    )
}
"""All dialects, by the path of their requests."""


SESSION_HEADER = "X-Session-ID"  # tells the conversations of a key `BY_HEADER` apart

# A client that is sent to another gateway has its key in the path. So have agents of NeMo Gym, for
# which it is the name of their run.
KEY_IN_PATH = ("/sessions/{key}", "/ng-rollout/{key}", "/ng-rollout/{key}/training-token-capture")


_SHARED = WeakValueDictionary[tuple[type, int], Any]()  # by the id of the section that each holds


class Gateway:
    """The server of a worker, shared by all sessions of its groups. `url` is OpenAI's."""

    def __init__(self, section: GatewaySection | None = None) -> None:
        self._section = section or GatewaySection()
        self._guests: dict[bytes, Guest] = {}  # by the hash of the key
        self._changing = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self.url = ""

    @classmethod
    def shared(cls, section: GatewaySection, *parts: Any) -> Self:
        """Return the gateway of this process for `section`; make it with `parts` if there is none.

        All loops of a worker share one, and open and close it together.
        """
        gateway: Self | None = _SHARED.get((cls, id(section)))
        if gateway is None:
            gateway = _SHARED[cls, id(section)] = cls(section, *parts)
        return gateway

    def admit(self, sessions: AgentSessions, key: str = "") -> str:
        """Return the key with which requests reach these sessions until it is dismissed.

        Default: a new one.
        """
        key = key or f"rmq-{secrets.token_urlsafe(24)}"
        self._guests[_hash(key)] = Guest(sessions)
        return key

    def dismiss(self, key: str) -> None:
        """End an agent's key, and cancel its open requests.

        Those of an interrupted agent end by themselves, and its program may live on.
        """
        guest = self._guests.pop(_hash(key))
        for request in () if guest.sessions.interrupted.is_set() else guest.requests:
            request.cancel()

    def interrupt(self) -> None:
        """Interrupt all sessions, also those in which nothing is sampled now."""
        for guest in self._guests.values():
            guest.sessions.interrupted.set()

    def guest_of(self, key: str) -> Guest | None:
        return self._guests.get(_hash(key))

    def routes(self) -> list[web.RouteDef]:
        served = [web.post(path, partial(self._serve, kind)) for path, kind in DIALECTS.items()]
        served.append(web.get("/v1/models", self._models))
        served.append(web.get("/v1/responses/{name}", self._retrieve))
        return [
            *(
                web.route(each.method, where + each.path, each.handler)
                for where in ("", *KEY_IN_PATH)
                for each in served
            ),
            web.route("*", "/{path:.*}", self._unknown),
        ]

    async def start(self) -> None:
        """Listen, unless it does. Raises ConfigError."""
        async with self._changing:
            self._runner = self._runner or await self._listen()

    async def close(self) -> None:
        """Stop listening; `start` may follow."""
        async with self._changing:
            runner, self._runner = self._runner, None
            if runner:
                await runner.cleanup()

    async def _listen(self) -> web.AppRunner:
        app = web.Application(client_max_size=LARGEST_REQUEST, middlewares=[_write_refusals])
        app.add_routes(self.routes())
        # A request whose agent has gone is cancelled, so that the engine stops sampling for it.
        runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=0.1,
            keepalive_timeout=QUIET_S,
        )
        _allow_open_files()
        await runner.setup()
        try:
            await _take_port(runner, self._section)
        except BaseException:
            await runner.cleanup()
            raise
        port = runner.addresses[0][1]
        self.url = f"{self._section.url(port, socket.gethostname())}/v1"
        log.info("agents reach this worker at %s", self.url)
        for warning in self._section.warnings():
            log.warning("%s", warning)
        return runner

    async def _guest(self, request: web.Request) -> tuple[Guest, Session]:
        """Return the agent and the session whose key is in a request. Raises Refusal."""
        for key, _, role in (each.partition(":") for each in given_keys(request)):
            if guest := self.guest_of(key) or await self._absent(key, request):
                guest.check_rate()
                if role == BY_HEADER:
                    role = request.headers.get(SESSION_HEADER, "")
                try:
                    return guest, guest.sessions.of(role)
                except ConfigError as error:
                    raise Refusal(400, str(error), "refused") from error
        return self.refuse_key()

    async def _absent(self, key: str, request: web.Request) -> Guest | None:
        """Return the agent of an unknown key, which has arrived meanwhile; by default None."""
        return None

    @staticmethod
    def refuse_key() -> NoReturn:
        why = "this key belongs to no session, or to one that has ended"
        raise Refusal(401, why, "invalid_api_key")

    async def _models(self, request: web.Request) -> web.Response:
        await self._guest(request)
        kinds = {"object": "model", "type": "model", "created_at": "1970-01-01T00:00:00Z"}
        model = {"id": MODEL, "display_name": MODEL, "owned_by": "rolloutmq", **kinds}
        return web.json_response({"object": "list", "data": [model], "has_more": False})

    async def _serve(self, kind: type[AgentRequest], request: web.Request) -> web.StreamResponse:
        guest, session = await self._guest(request)
        with guest.asking(request):
            return await _answer(request, kind, guest, session)

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        """Answer with an earlier response of the session."""
        _, session = await self._guest(request)
        name = request.match_info["name"]
        if not (turn := session.answered(name.removeprefix("resp_"))):
            raise Refusal(404, f"this session has no response {name:.80}", "not_found")
        is_streamed = request.query.get("stream") == "true"
        asked = ResponsesRequest.model_construct(input=[], stream=is_streamed)
        return await Reply(request, asked).send(turn, [])

    async def _unknown(self, request: web.Request) -> web.Response:
        await self._guest(request)
        known = f"POST {', '.join(DIALECTS)}, GET /v1/models, /v1/responses/ID"
        asked = f"{request.method} {request.path}"
        message = f"{asked} cannot be recorded for training; there are {known}"
        raise Refusal(404, message, "unsupported")


async def _answer(
    request: web.Request, kind: type[AgentRequest], guest: Guest, session: Session
) -> web.StreamResponse:
    body = await body_of(request)
    asked, ask = await in_thread_of_texts(len(body), _parse, kind, body, session.known)
    ask = replace(ask, size=len(body))
    if asked.counts:
        tokens = await _done(partial(session.count, ask), guest)
        return web.json_response({"input_tokens": tokens})
    name = hashlib.sha256(f"{session.name} {kind.path} ".encode() + body).digest()
    turn = guest.answer_again(request, name)
    reply = request[REPLY] = Reply(request, asked)
    if turn is None:
        turn = await reply.wait(_done(partial(session.ask, ask), guest))
        keep(guest.answered, name, turn)
    try:
        await reply.wait(_done(session.stored, guest))
        wants_texts = asked.wants_logprobs
        pieces = await in_tokenizer_thread(session.pieces, turn.made) if wants_texts else []
        return await reply.send(turn, pieces)
    except (OSError, asyncio.CancelledError):  # the agent has gone, and may ask again
        keep(guest.unsent, name, turn)
        raise


async def body_of(request: web.Request) -> bytes:
    """Return the body of a request. Raises Refusal if it takes too long."""
    try:
        async with asyncio.timeout(QUIET_S):
            return await request.read()
    except TimeoutError as error:
        raise Refusal(408, f"the body took longer than {QUIET_S:g} s", "timeout") from error


async def _take_port(runner: web.AppRunner, section: GatewaySection) -> None:
    """Listen on the first free port of a section. Raises ConfigError."""
    context = section.tls_context()
    for port in range(section.port, section.port + section.ports):
        try:
            await web.TCPSite(runner, section.host, port, ssl_context=context).start()
            return
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
            reason = error
            if getattr(error, "errno", 0) != errno.EADDRINUSE:
                break
    raise ConfigError(
        f"the gateway cannot listen on {section.host}, port {port}: {reason}",
        hint="set [gateway] port to a free one, and ports to the number of workers on this machine",
    ) from reason


def _allow_open_files() -> None:
    """Raise the limit of open files, often 1024, as far as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def given_keys(request: web.Request) -> list[str]:
    """Return what a request gives as keys, in the ways of OpenAI, Anthropic and NeMo Gym."""
    kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
    in_path = request.match_info.get("key", "")
    in_header = request.headers.get("x-api-key", "")
    given = [in_path, in_header, bearer if kind.lower() == "bearer" else ""]
    return [key for key in map(str.strip, given) if key]


def _hash(key: str) -> bytes:
    """Return the name of a key. Looking it up in a table tells a guesser nothing by its time."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


async def _done(work: Callable[[], Awaitable[T]], guest: Guest) -> T:
    """Return the result of `work` in a session of `guest`. Raises Refusal."""
    try:
        return await work()
    except (SessionClosed, ContextFull) as error:
        if isinstance(error, SessionClosed) and guest.sessions.interrupted.is_set():
            raise Refusal(503, str(error), "interrupted") from error
        raise Refusal(400, str(error), "context_length_exceeded") from error
    except (ConfigError, GenerationError, WireError) as error:
        raise Refusal(400, str(error), "refused") from error
    except Fenced as error:
        guest.sessions.interrupted.set()
        raise Refusal(503, "interrupted", "interrupted") from error
    except EngineDeadError as error:
        guest.sessions.failure = error
        guest.sessions.interrupted.set()
        raise Refusal(503, "the engine died", "interrupted") from error


def _parse(kind: type[AgentRequest], body: bytes, known: Known) -> tuple[AgentRequest, Ask]:
    """Return the request in `body`, perhaps without its messages, and what it asks, with them."""
    is_large = 4 * len(body) > MOST_VALUES
    if is_large and body.count(b",") + 4 * (body.count(b"[") + body.count(b"{")) > MOST_VALUES:
        raise Refusal(413, "this request has too many values to be read", "request_too_large")
    body, messages = split(kind, body, known)
    try:
        asked = kind.model_validate_json(body)
    except ValidationError:
        text = body.decode(errors="replace")
        whole = _ESCAPE.sub(lambda found: "\ufffd" if found[1] else found[0], text).encode()
        try:
            asked = kind.model_validate_json(whole)
        except ValidationError as error:
            raise _faults(error) from error
    ask = asked.ask()
    return asked, replace(ask, messages=messages) if messages else ask


def _faults(error: ValidationError) -> Refusal:
    wrong = error.errors(include_url=False, include_input=False)
    faults = [
        ": ".join(filter(None, [".".join(map(str, fault["loc"])), fault["msg"]]))
        for fault in wrong[:8]  # a request may have a million
    ]
    message = f"this request cannot be recorded for training: {'; '.join(faults)}"
    field = str(wrong[0]["loc"][0]) if wrong[0]["loc"] else None
    return Refusal(400, message, "unsupported", field)


@web.middleware
async def _write_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return errors in the form that the dialect's clients parse."""
    try:
        return await handler(request)
    except Refusal as error:
        refusal = error
    except web.HTTPRequestEntityTooLarge:
        message = f"a request has {LARGEST_REQUEST} bytes at most"
        refusal = Refusal(413, message, "request_too_large")
    except web.HTTPException as error:
        refusal = Refusal(error.status, error.reason, "bad_request")
    except web.RequestPayloadError as error:  # a body that does not fit its headers
        refusal = Refusal(400, str(error), "bad_request")
    except OSError:  # the agent has gone
        raise
    except Exception as error:  # a fault of this program or of a tokenizer; the agent gets it
        resource = request.match_info.route.resource  # its own path may have a key
        where = resource.canonical if resource else ""
        log.exception("a request of an agent failed", extra={"path": where})
        refusal = Refusal(500, f"{type(error).__name__}: {error}", "internal_error")
    fitting = (kind for path, kind in DIALECTS.items() if request.path.endswith(path))
    dialect = next(fitting, ChatRequest)
    message = refusal.message[:4096]
    told = dialect.error(refusal.status, message, refusal.code, refusal.field)
    if REPLY in request and request[REPLY].has_begun:
        return await request[REPLY].refuse(told)
    return web.json_response(told, status=refusal.status, headers=refusal.headers)
