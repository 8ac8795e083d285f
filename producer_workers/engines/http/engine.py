"""Use a server of the OpenAI API that returns token ids, such as `vllm serve`, as engine.

Invariant: no part of a response spans two versions, so tokens need no version labels: an update
first ends all parts, then each request continues after its tokens. A server serves one worker,
which pauses and updates it as a whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import RolloutMQError
from buffer.redis.retry import Backoff
from buffer.wire.rollout import PolicyVersion
from buffer.wire.sampling import SampleParams
from producer_workers.call_turns import Turns
from producer_workers.config.engine import HttpConfig
from producer_workers.engines.base import (
    EngineDeadError,
    EngineError,
    Generation,
    GenerationError,
    GrowingResponse,
    PauseMode,
    WeightsError,
)
from producer_workers.engines.http.server import (
    CompletionServer,
    Piece,
    ServerGone,
    ServerRefusal,
    TooManyRequests,
    applies_structure,
    check_logprobs,
    gather_quietly,
)
from producer_workers.engines.http.weights import ServerAdapters, ServerWeights
from producer_workers.engines.vllm.api import REASONS, sampling_arguments, structure_arguments

logger = logging.getLogger(__name__)

FRUITLESS = 5  # parts of a response without a token, in a row, after which it fails
PAUSES = Backoff(0.5, 8.0, jitter=0.5)  # between them


class HttpRequest(GrowingResponse):
    """A response that a server makes in parts; each part continues the earlier ones."""

    def __init__(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> None:
        super().__init__()
        self.id = request_id
        self.group = request_id.partition("/")[0]
        self._prompt = prompt_ids.tolist()
        self._params = params

    def prompt(self) -> list[int]:
        return [*self._prompt, *self.token_ids]

    def most_tokens(self) -> int:
        return self._params.after(len(self.token_ids)).max_tokens

    def sampling(self) -> dict[str, Any]:
        """Return all sampling fields for the next part: servers have their own defaults."""
        params = self._params.after(len(self.token_ids))
        fields = sampling_arguments(params)
        if params.structured:
            fields["structured_outputs"] = structure_arguments(params.structured)
        return fields

    def end_part(self) -> None:
        """Drop the tokens of an interrupted structured response, which cannot be continued."""
        if self._params.structured and not self.finish_reason:
            self.forget()

    def receive(self, piece: Piece) -> None:
        """Add what the server sent. Raises GenerationError if the finish reason is a failure."""
        self.add(piece.token_ids, piece.logprobs)
        reason = piece.finish_reason
        if reason in REASONS and reason != "abort":  # which only ends this part
            self.finish_reason = REASONS[reason]
        elif reason not in (None, "abort"):
            raise GenerationError(f"the server ended a response with the reason {reason!r}")
        elif len(self.token_ids) >= self._params.max_tokens:
            self.finish_reason = "length"


class HttpEngine:
    name = "http"

    def __init__(self, config: HttpConfig, model_dir: Path, version: PolicyVersion) -> None:
        self._config = config
        self._loaded_from = model_dir
        self._version = version
        self._server = CompletionServer(config.url, config.model, config.api_key)
        self._updates = config.weights != "static"
        kind = ServerAdapters if config.weights == "adapters" else ServerWeights
        self._weights = kind(self._server, config, model_dir)
        self.structures_output = False
        self.turns: Turns | None = None
        """of its requests, under [engine] limit"""
        self.max_model_len: int | None = None
        self._requests: set[HttpRequest] = set()
        self._parts: dict[HttpRequest, asyncio.Task[None]] = {}
        self._closed = True
        self._interruptions = 0  # of all parts, by this process
        self._paused = False
        self._changed = asyncio.Condition()
        self._lock = asyncio.Lock()  # orders pause, resume and updates
        self._watch: asyncio.Task[None] | None = None
        self._updating: asyncio.Task[None] | None = None
        self._dead: str | None = "not started"

    async def start(self) -> None:
        try:
            await self._server.open()
            self.max_model_len = self._server.max_model_len
            if self._updates:  # first, since a worker that died may have left the server paused
                try:
                    await self._weights.take_over(self._version)
                except ServerRefusal as error:
                    what = f"{self._config.url} cannot load weights: {error.message}"
                    raise EngineError(what, hint=self._weights.hint) from error
            await check_logprobs(self._server)
            self.structures_output = await applies_structure(self._server)
        except (ServerGone, ServerRefusal) as error:
            await self._server.close()
            raise EngineError(error.message, hint=error.hint) from error
        except BaseException:
            await self._server.close()
            raise
        self._dead = None
        await self._set_closed(False)
        self._watch = asyncio.create_task(self._watch_server())
        logger.info("%s serves %s as %s", self._config.url, self._server.model, self._version)

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        self.check_health()
        if params.structured and not self.structures_output:
            raise GenerationError(
                f"{self._config.url} ignores `structured_outputs`",
                hint="remove sample.structured of the task, or use another server",
            )
        request = HttpRequest(request_id, prompt_ids, params)
        self._requests.add(request)
        fruitless = 0
        try:
            while not request.finish_reason:
                async with self._changed:
                    await self._changed.wait_for(
                        lambda: bool(request.finish_reason or self._dead or not self._closed)
                    )
                self.check_health()
                if request.finish_reason:
                    break
                made, interruptions = len(request.token_ids), self._interruptions
                await self._ask(request)
                if request.finish_reason:
                    break
                is_fruitless = len(request.token_ids) <= made
                if is_fruitless and interruptions == self._interruptions:
                    fruitless += 1
                    await self._pause_request(request, fruitless)
                else:
                    fruitless = 0
            return request.generation()
        finally:
            self._requests.discard(request)

    async def _pause_request(self, request: HttpRequest, fruitless: int) -> None:
        """Wait before the next part of a response. Raises GenerationError after the last try."""
        what = f"{self._config.url} ended a response without a token or a finish reason"
        if fruitless >= FRUITLESS:
            hint = "the server must stream `/v1/completions` as vLLM does"
            raise GenerationError(f"{what}, {fruitless} times in a row", hint=hint)
        logger.warning("%s: try %d of %d", what, fruitless, FRUITLESS)
        with suppress(TimeoutError):
            async with asyncio.timeout(PAUSES.pause_s(fruitless - 1)), self._changed:
                await self._changed.wait_for(lambda: bool(request.finish_reason or self._dead))

    async def pause(self, mode: PauseMode) -> None:
        self.check_health()
        async with self._lock:
            self._paused = True
            if mode == "keep" and self._updates:
                await self._control(self._server.pause("keep", self._config.control_timeout_s))
                return
            await self._interrupt()
            if mode == "abort":
                for request in self._requests:
                    request.finish("abort")
                await self._set_closed(True)

    async def abort_others(self, spared: Collection[str]) -> None:
        self.check_health()
        others = [request for request in self._requests if request.group not in spared]
        for request in others:
            request.finish("abort")
        await gather_quietly({self._parts[request] for request in others if request in self._parts})
        await self._set_closed(self._closed)

    async def resume(self) -> None:
        self.check_health()
        async with self._lock:
            self._paused = False
            await self._continue()

    async def load_weights(self, path: Path, version: PolicyVersion) -> None:
        self.check_health()
        if not self._updates:
            raise WeightsError(
                f"{path} is not loaded: the weights of {self._config.url} are static",
                hint="set [engine] weights = 'update' to let the worker load new ones",
            )
        await self._weights.check(path)
        # Shielded: a caller that gives up must not leave the server paused between two sets of
        # weights.
        self._updating = asyncio.create_task(self._update(path, version))
        await asyncio.shield(self._updating)

    async def sleep(self) -> None:
        raise EngineError(
            f"{self._config.url} cannot sleep: the worker does not own the server",
            hint="use an engine of kind vllm",
        )

    async def wake(self) -> None:
        self.check_health()

    def version(self) -> PolicyVersion:
        return self._version

    def check_health(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(
                f"the server is gone: {self._dead}", hint="restart it, then the worker"
            )

    def unfinished(self) -> int:
        return len(self._requests)

    async def shutdown(self) -> None:
        if self._watch:
            await gather_quietly({self._watch})
        for request in self._requests:
            request.finish("abort")
        await gather_quietly(set(self._parts.values()))
        if self._dead is None and self._updates:
            try:  # the next client finds the server running
                await self._server.resume(self._config.control_timeout_s)
            except RolloutMQError as error:
                logger.warning(
                    "%s stays paused, it could not be resumed: %s", self._config.url, error
                )
        self._dead = self._dead or "shut down"
        await self._set_closed(True)
        await self._server.close()

    # -- one part of a response

    async def _ask(self, request: HttpRequest) -> None:
        version = self._version
        part = asyncio.create_task(self._read(request))
        self._parts[request] = part
        try:
            await asyncio.wait({part})
        finally:
            await gather_quietly({part})
            del self._parts[request]
            request.stamp(version)
            request.end_part()
        if not part.cancelled():
            part.result()

    async def _read(self, request: HttpRequest) -> None:
        if self.turns is None:
            await self._stream(request)
            return
        while True:
            prompt = len(request.prompt())
            async with self.turns.turn(prompt + request.most_tokens(), request.id) as turn:
                try:
                    await self._stream(request)
                    turn.used(len(request.prompt()))
                    return
                except TooManyRequests as refusal:
                    turn.refused(refusal.retry_after_s, refusal.message)

    async def _stream(self, request: HttpRequest) -> None:
        try:
            async for piece in self._server.stream(request.prompt(), request.sampling()):
                request.receive(piece)
        except ServerGone as error:
            raise await self._declare_dead(str(error)) from error

    async def _interrupt(self) -> None:
        """End all parts, with the tokens that the server has; none starts before `_continue`."""
        self._interruptions += 1
        await self._set_closed(True)
        if self._updates:
            await self._control(self._server.pause("abort", self._config.control_timeout_s))
            if self._parts:
                # the last tokens of aborted requests may come; later ones are sampled again
                await asyncio.wait(set(self._parts.values()), timeout=2.0)
        await gather_quietly(set(self._parts.values()))

    async def _continue(self) -> None:
        if self._updates:
            await self._control(self._server.resume(self._config.control_timeout_s))
        await self._set_closed(False)

    async def _set_closed(self, closed: bool) -> None:
        async with self._changed:
            self._closed = closed
            self._changed.notify_all()

    # -- weights

    async def _update(self, path: Path, version: PolicyVersion) -> None:
        async with self._lock:
            await self._interrupt()
            try:
                await self._weights.load(path, version)
                self._loaded_from = path
                self._version = version
            except ServerGone as error:
                raise await self._declare_dead(str(error)) from error
            except ServerRefusal as error:
                await self._restore(error)
                raise WeightsError(
                    f"the server could not load {path}: {error}", hint="the old weights run"
                ) from error
            finally:
                if not self._paused and self._dead is None:
                    await self._continue()

    async def _restore(self, cause: Exception) -> None:
        try:
            await self._weights.load(self._loaded_from, self._version)
        except (ServerGone, ServerRefusal) as error:
            raise await self._declare_dead(
                f"an update failed ({cause}), and so did restoring the old weights ({error})"
            ) from error

    # -- life

    async def _control(self, call: Awaitable[None]) -> None:
        """Pause or resume the server; declare it dead if that fails."""
        try:
            await call
        except (ServerGone, ServerRefusal) as error:
            raise await self._declare_dead(str(error)) from error

    async def _watch_server(self) -> None:
        """Notice that an idle server ends, or that another client changes its weights."""
        while self._dead is None:
            await asyncio.sleep(2.0)
            try:
                await self._server.check_health()
                if not self._updates or self._lock.locked():
                    continue
                expected = self._version
                label = await self._server.weight_label()
                is_idle = self._version == expected and not self._lock.locked()
                if is_idle and label != str(expected):
                    await self._declare_dead(
                        f"another client changed its weights from {expected} to {label}"
                    )
            except (ServerGone, ServerRefusal) as error:
                await self._declare_dead(str(error))

    async def _declare_dead(self, why: str) -> EngineDeadError:
        self._dead = self._dead or why
        await self._set_closed(True)
        return EngineDeadError(
            f"the server is gone: {self._dead}", hint="restart it, then the worker"
        )
