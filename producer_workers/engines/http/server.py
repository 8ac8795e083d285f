"""A client of the OpenAI API and development mode of vLLM 0.32.

Invariant: every token comes with an id and a logprob; text is never tokenized again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import aiohttp
import msgspec
import numpy as np
import orjson

from buffer.errors import ModelError, NoAnswer, ServiceAway
from producer_workers.engines.base import EngineError, GenerationError, Scores
from producer_workers.engines.http.event_stream import EventTooLong, event_data
from producer_workers.http_client import (
    LONGEST_ANSWER,
    LONGEST_REASON,
    TOO_MANY,
    HttpAnswer,
    ask,
)

T = TypeVar("T")

CONNECT_S = 10.0
HEALTH_S = 60.0  # a dead server refuses at once; a busy one may take long

MAX_EVENT_BYTES = 32 << 20  # of a stream; the first event carries the ids of the prompt

IDS_HINT = "the server must answer `return_token_ids`, as vLLM does"

PROBES = ([11, 12, 13], [21, 3, 8, 5], [7])


class ServerGone(ModelError):
    """The server is unreachable, or reports that its engine is dead."""


class TooManyRequests(GenerationError):
    """The server refused a request because of a limit of its own."""

    retry_after_s = 0.0


class ServerAway(ServerGone):
    """The server refuses connections, or has no room: it may be there later."""


class ServerRefusal(ModelError):
    """The server answered with an error."""

    status = 0


class Piece(NamedTuple):
    """One event of a stream: token ids and their logprobs; the last one has a finish reason."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None


# What is read of the server's answers, and of the events of its streams.


class ServedModel(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[ServedModel]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Weights(msgspec.Struct):
    weight_version: str


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float] | None = None
    top_logprobs: list[dict[str, float]] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]] | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None  # empty: the event counts tokens
    error: Any = None


class CompletionServer:
    """One server at `url`. All methods raise ServerGone if it does not answer."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self.max_model_len: int | None = None
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Find the served model and its context length. Raises EngineError without a model."""
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            # The server may close a kept connection just as it is used again, which would look like
            # a dead server.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S),
            read_bufsize=MAX_EVENT_BYTES,
        )
        served = await self.models()
        self.model = self.model or next(iter(served), None)
        if self.model not in served:
            raise EngineError(
                f"{self.url} serves {', '.join(served) or 'no model'}, not {self.model}"
            )
        self.max_model_len = served[str(self.model)].max_model_len

    async def models(self) -> dict[str, ServedModel]:
        """Return the server's models, then its adapters, by name."""
        served = await self._call("GET", "/v1/models", HEALTH_S, kind=_Models)
        return {model.id: model for model in served.data}

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    async def stream(
        self, prompt_ids: list[int], sampling: Mapping[str, Any]
    ) -> AsyncIterator[Piece]:
        """Sample one response. Raises GenerationError; without a finish reason, it was aborted.

        Closing the iterator, or cancelling, closes the connection, which aborts the request.
        """
        body = {
            "model": self.model,
            "prompt": prompt_ids,
            "logprobs": 0,
            **sampling,
            "stream": True,
            "stream_interval": 32,  # tokens; an event for each would cost much JSON
            "return_token_ids": True,
        }
        try:
            async with self._open_session.post(
                f"{self.url}/v1/completions",
                data=orjson.dumps(body),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    said = await response.content.read(LONGEST_REASON)
                    refused = HttpAnswer.of(response, said)
                    kind = TooManyRequests if response.status == TOO_MANY else GenerationError
                    refusal = kind(f"{self.url} {refused.problem}")
                    if isinstance(refusal, TooManyRequests):
                        refusal.retry_after_s = refused.retry_after_s
                    raise refusal
                async for data in event_data(response.content.iter_any(), MAX_EVENT_BYTES):
                    if data == b"[DONE]":
                        return
                    if data and (piece := self._piece(data)):
                        yield piece
        except EventTooLong as error:
            raise GenerationError(f"{self.url}: {error}") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            # Raises ServerGone if the server itself died, not just this connection.
            await self.check_health()
            raise GenerationError(f"the connection to {self.url} broke: {error!r}") from error

    def _piece(self, data: bytes) -> Piece | None:
        """Return what an event has of the response. Raises GenerationError."""
        try:
            told = msgspec.json.decode(data, type=_Event)
        except (msgspec.DecodeError, RecursionError) as error:
            what = f"{self.url} sent an event that cannot be read: {error}: {_quoted(data)}"
            raise GenerationError(what, hint=IDS_HINT) from error
        if told.error is not None:
            raise GenerationError(f"{self.url} failed a request: {told.error!s:.500}")
        if told.choices is None:
            what = f"{self.url} sent an event without choices: {_quoted(data)}"
            raise GenerationError(what, hint=IDS_HINT)
        if not told.choices:
            return None
        choice = told.choices[0]
        token_ids = choice.token_ids or []
        values = (choice.logprobs and choice.logprobs.token_logprobs) or []
        if len(token_ids) != len(values):
            what = f"{self.url} gave {len(token_ids)} token ids and {len(values)} logprobs"
            raise GenerationError(what, hint=IDS_HINT)
        return Piece(token_ids, values, choice.finish_reason)

    async def scores(self, ids: list[int], start: int, top_k: int, limit_s: float) -> Scores:
        """Return the scores of `ids[start:]`, see `ScoresTexts`. Raises ServerRefusal."""
        body = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top_k,
        }
        # 256 bytes: one logprob with its token's text
        most = LONGEST_ANSWER + 256 * (top_k + 1) * len(ids)
        try:
            answer = await self._complete(limit_s, body, most)
            rows: Any = answer.prompt_logprobs or []
            return _scores(rows[start:], ids[start:], top_k)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            what = f"{self.url} gave no logprob for each token of a prompt: {error!r}"
            raise ServerRefusal(
                what, hint="the server must answer `prompt_logprobs`, as vLLM does"
            ) from error

    async def tokenize(self, text: str) -> list[int] | None:
        """Return the ids of a text; None if the server has no such call, as vLLM has."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            found = await self._call("POST", "/tokenize", HEALTH_S, body, kind=_Tokens)
        except ServerRefusal:
            return None
        return found.tokens

    async def top_logprobs(self, prompt_ids: list[int], temperature: float) -> list[float]:
        """Return the two largest logprobs of the token after a prompt."""
        body = {
            "model": self.model,
            "prompt": prompt_ids,
            "max_tokens": 1,
            "logprobs": 2,
            "temperature": temperature,
            "top_p": 1.0,
            "return_tokens_as_token_ids": True,
        }
        answer = await self._complete(HEALTH_S, body)
        top = answer.logprobs and answer.logprobs.top_logprobs
        if not top:
            raise EngineError(f"{self.url} reports no logprobs", hint=IDS_HINT)
        return sorted(top[0].values())[-2:]

    async def text(self, prompt_ids: list[int], sampling: Mapping[str, Any]) -> str:
        """Return a response as text, to test the server. Raises ServerRefusal."""
        body = {"model": self.model, "prompt": prompt_ids, **sampling}
        return (await self._complete(HEALTH_S, body)).text

    async def _complete(
        self, timeout_s: float, body: Mapping[str, Any], most: int = LONGEST_ANSWER
    ) -> _Choice:
        path = "/v1/completions"
        made = await self._call("POST", path, timeout_s, body, kind=_Completion, most=most)
        return made.choices[0]

    async def check_health(self) -> None:
        await self._send("GET", "/health", HEALTH_S)

    # -- vLLM's development mode

    async def weight_label(self) -> str:
        return (await self._call("GET", "/weight_info", HEALTH_S, kind=_Weights)).weight_version

    async def name_weights(self, label: str, timeout_s: float) -> None:
        await self._send("POST", "/update_weight_version", timeout_s, {"new_version": label})

    async def pause(self, mode: str, timeout_s: float) -> None:
        await self._send("POST", f"/pause?mode={mode}&clear_cache=false", timeout_s)

    async def resume(self, timeout_s: float) -> None:
        await self._send("POST", "/resume", timeout_s)

    async def drop_caches(self, timeout_s: float) -> None:
        await self._send("POST", "/reset_prefix_cache", timeout_s)

    async def call_workers(self, method: str, *args: str, timeout_s: float) -> None:
        await self._send("POST", "/collective_rpc", timeout_s, {"method": method, "args": args})

    # -- adapters

    async def check_adapters(self, timeout_s: float) -> None:
        """Raise ServerRefusal if the server has no endpoint for adapters."""
        try:
            await self.load_adapter("", "", timeout_s)
        except ServerRefusal as refusal:
            # 400: the endpoint exists, and refuses an adapter without a name.
            if refusal.status != 400:
                raise

    async def load_adapter(self, name: str, folder: str, timeout_s: float) -> None:
        await self._send(
            "POST", "/v1/load_lora_adapter", timeout_s, {"lora_name": name, "lora_path": folder}
        )

    async def unload_adapter(self, name: str, timeout_s: float) -> None:
        await self._send("POST", "/v1/unload_lora_adapter", timeout_s, {"lora_name": name})

    async def _call(
        self,
        verb: str,
        path: str,
        timeout_s: float,
        body: Mapping[str, Any] | None = None,
        *,
        kind: type[T],
        most: int = LONGEST_ANSWER,
    ) -> T:
        """Return the answer, of this kind. Raises as `_send`, and ServerRefusal for any other."""
        text = await self._send(verb, path, timeout_s, body, most)
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            what = f"{self.url}{path} gave an answer that cannot be read: {error}: {_quoted(text)}"
            raise ServerRefusal(what, hint="check that it is a server of the OpenAI API") from error

    async def _send(
        self,
        verb: str,
        path: str,
        timeout_s: float,
        body: Mapping[str, Any] | None = None,
        most: int = LONGEST_ANSWER,
    ) -> bytes:
        """Return the body of the answer. Raises ServerRefusal, or ServerGone (also for 503)."""
        data = orjson.dumps(body) if body is not None else None
        url = self.url + path
        try:
            answer = await ask(self._open_session, verb, url, data, limit_s=timeout_s, most=most)
        except NoAnswer as error:
            kind = ServerAway if isinstance(error, ServiceAway) else ServerGone
            message = f"{url} does not answer: {error.message}"
            raise kind(message, hint="check that the server runs") from error
        if answer.status == 503:
            raise ServerAway(f"{url} {answer.problem}")
        if answer.problem:
            refusal = ServerRefusal(f"{url} {answer.problem}")
            refusal.status = answer.status
            raise refusal
        return answer.body

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            raise ServerGone(f"no connection to {self.url} is open")
        return self._session


def _quoted(data: bytes) -> str:
    return data[:200].decode(errors="replace")


def _scores(rows: list[dict[str, dict[str, float]]], ids: list[int], top_k: int) -> Scores:
    """Return the scores of `ids`, each with a row of {token id: {logprob, rank}}."""
    if len(rows) != len(ids):
        raise ValueError(f"{len(rows)} rows for {len(ids)} tokens")
    top = [sorted(row, key=lambda token: row[token]["rank"])[:top_k] for row in rows]
    return Scores(
        np.array([row[str(token)]["logprob"] for token, row in zip(ids, rows, strict=True)], "<f4"),
        np.array([list(map(int, best)) for best in top], "<i4").reshape(len(ids), top_k),
        np.array(
            [
                [row[token]["logprob"] for token in best]
                for best, row in zip(top, rows, strict=True)
            ],
            "<f4",
        ).reshape(len(ids), top_k),
    )


async def check_logprobs(server: CompletionServer) -> None:
    """Raise EngineError unless tokens have ids, and logprobs of the sampled distribution.

    Half the temperature doubles the difference between two logprobs, unless the server takes them
    before the temperature.
    """
    try:
        async for _ in server.stream(PROBES[0], {"max_tokens": 1}):
            pass
    except GenerationError as error:
        raise EngineError(error.message, hint=error.hint) from error
    for prompt in PROBES:
        plain, cold = [await server.top_logprobs(prompt, temperature) for temperature in (1.0, 0.5)]
        near = plain[-1] - plain[0]
        far = cold[-1] - cold[0]
        if near <= 1e-3:  # a smaller one, in nats, proves nothing
            continue
        if far < 1.5 * near:
            hint = "start vLLM with --logprobs-mode processed_logprobs"
            message = f"{server.url} reports logprobs before temperature and top-p"
            raise EngineError(message, hint=hint)
        return
    raise EngineError(
        f"{server.url} gave the same logprob to any two tokens",
        hint="check that it serves a language model",
    )


async def applies_structure(server: CompletionServer) -> bool:
    """Return whether the server applies `structured_outputs`; most ignore unknown fields."""
    only = "a7-b8"
    sampling = {"max_tokens": 16, "structured_outputs": {"choice": [only]}}
    try:
        return await server.text(PROBES[0], sampling) == only
    except ServerRefusal:
        return False


async def gather_quietly(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their end, without raising their errors."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
