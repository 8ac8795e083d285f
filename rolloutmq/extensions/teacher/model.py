"""One teacher's model: an engine beside the worker's own, or a server. Its answers are checked.

    Loaded    the engine is replaced when it dies, as that of a worker, a limited number of times
    Served    a server that is away is waited for, since no rollout is to blame

All tasks of a worker share it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ConfigError, JudgeError, ModelError, NoAnswer, RolloutMQError, ServiceAway
from buffer.redis.retry import Backoff
from buffer.wire.rollout import FIRST_WEIGHTS
from producer_workers.agent_loops.tokenizer import in_tokenizer_thread, load_tokenizer
from producer_workers.config.engine import HttpConfig
from producer_workers.config.producing import ProducingConfig
from producer_workers.config.task import JudgingSection
from producer_workers.engines import build_engine, engine_restarts, started
from producer_workers.engines.base import (
    Engine,
    EngineDeadError,
    GenerationError,
    Scores,
    ScoresTexts,
    context_length,
)
from producer_workers.engines.model_folder import vocabulary_size
from producer_workers.http_client import AWAY, RETRIED
from rolloutmq.extensions.teacher.settings import TeacherSection

log = logging.getLogger("rolloutmq.judge")

AT_ONCE = 16  # texts of one worker; the time limit of others begins when it is their turn
PAUSES = Backoff(0.2, 10.0, jitter=0.5)  # before a text is scored again
AWAY_PAUSES = Backoff(1.0, 5.0)  # before a server that is away is asked again
QUIET_S = 60.0  # between two lines of the log about that
PROBE = np.array([0, 1, 2], "<i4")  # token ids of every model


class Model(ABC):
    """Scores texts. `section.top_k` is the largest that a task of `tasks` asks for."""

    def __init__(
        self, name: str, section: TeacherSection, config: ProducingConfig, tasks: list[str]
    ) -> None:
        self.name = name
        self._section = section
        self._config = config
        self._tasks = tasks
        self._vocabulary = vocabulary_size(config.model_folder)
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._quiet_until_s = 0.0

    @abstractmethod
    async def open(self) -> None:
        """Start it. May be called again. Raises ConfigError, ModelError."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def _ask(self, ids: NDArray[np.int32], start: int, top_k: int, limit_s: float) -> Scores:
        """Return the scores of `ids[start:]`, `start` at least 1.

        Raises ServiceAway (it is waited for), NoAnswer (it is repeated), and other errors.
        """

    async def score(
        self, ids: NDArray[np.int32], start: int, top_k: int, judging: JudgingSection
    ) -> Scores:
        """Return the scores of `ids[start:]` at temperature 1.

        Raises JudgeError, and EngineDeadError where no engine will be started again.
        """
        async with self._turns:
            failed = 0
            for attempt in itertools.count():
                try:
                    scores = await self._ask(ids, start, top_k, judging.timeout_s)
                    self._check(scores, len(ids) - start, top_k)
                    return scores
                except ServiceAway as error:
                    self._note_away(error)
                    await asyncio.sleep(AWAY_PAUSES.pause_s(attempt))
                except NoAnswer as error:
                    failed += 1
                    if failed > judging.retries:
                        hint = "see [tasks.<name>.judging] timeout_s and retries"
                        raise JudgeError(f"teacher {self.name}: {error}", hint=hint) from error
                    await asyncio.sleep(PAUSES.pause_s(failed - 1))
                except (JudgeError, EngineDeadError):
                    raise
                except RolloutMQError as error:
                    what = f"teacher {self.name}: {error.message}"
                    raise JudgeError(what, hint=error.hint) from error
        raise AssertionError("unreachable")

    def _note_away(self, error: ServiceAway) -> None:
        if time.monotonic() >= self._quiet_until_s:
            self._quiet_until_s = time.monotonic() + QUIET_S
            log.warning("teacher %s: %s; rollouts wait for it", self.name, error)

    def _check(self, scores: Scores, tokens: int, top_k: int) -> None:
        columns = (scores.logprobs[:, None], scores.top_ids, scores.top_logprobs)
        shapes = [column.shape for column in columns]
        is_finite = all(np.isfinite(column).all() for column in columns)
        if shapes != [(tokens, 1), (tokens, top_k), (tokens, top_k)] or not is_finite:
            raise JudgeError(
                f"teacher {self.name} gave no finite logprob for each of {tokens} tokens",
                hint="check the model's weights and their number format",
            )
        most = int(scores.top_ids.max(initial=0))
        if self._vocabulary is not None and most >= self._vocabulary:
            raise JudgeError(
                f"teacher {self.name} names token {most}, and the student has only "
                f"{self._vocabulary} token ids",
                hint="set top_k = 0, or take a teacher with as many token ids as the student",
            )

    def _check_context(self, tokens: int | None) -> None:
        if problem := self._config.context_problem(tokens, self._tasks):
            raise ConfigError(f"teacher {self.name}: {problem}")


class Loaded(Model):
    """A model that an engine of this worker has loaded."""

    _engine: Engine | None = None
    _keeper: asyncio.Task[None] | None = None
    _end: Exception | None = None  # why there is no engine any more
    _death = ""

    async def open(self) -> None:
        if self._keeper is None:
            self._ready, self._died, self._ids = asyncio.Event(), asyncio.Event(), itertools.count()
            settings = self._section.settings(self._config)
            work = engine_restarts.serve(self._start, self._keep, settings.restarts)
            self._keeper = asyncio.create_task(work, name=f"teacher {self.name}")
            self._keeper.add_done_callback(self._note_end)
        await self._ready.wait()
        if self._end:
            raise self._end

    async def close(self) -> None:
        if self._keeper:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def _ask(self, ids: NDArray[np.int32], start: int, top_k: int, limit_s: float) -> Scores:
        await self._ready.wait()
        engine = self._engine
        if engine is None or self._end:
            raise EngineDeadError(f"teacher {self.name} has no engine: {self._end}")
        try:
            async with asyncio.timeout(limit_s):
                request = f"{self.name}/{next(self._ids)}"
                return await cast(ScoresTexts, engine).score(request, ids, start, top_k)
        except TimeoutError as error:
            raise NoAnswer(f"no answer within its limit of {limit_s:g} s") from error
        except GenerationError as error:
            raise NoAnswer(error.message, hint=error.hint) from error
        except EngineDeadError as error:
            if engine is self._engine:
                self._death = str(error)
                self._ready.clear()
                self._died.set()
            raise NoAnswer(str(error)) from error

    async def _start(self) -> Engine:
        folder = self._section.folder(self._config)
        await asyncio.to_thread(check_same_tokens, self.name, self._config.model_folder, folder)
        engine = build_engine(self._section.settings(self._config), folder, FIRST_WEIGHTS)
        if not isinstance(engine, ScoresTexts):
            raise ConfigError(f"the engine {engine.name} cannot score texts, as {self.name} must")
        await started(engine, self._config.worker.start_timeout_s)
        try:
            self._check_context(context_length(engine))
            await engine.score("probe", PROBE, 1, self._section.top_k)
        except GenerationError as error:
            await engine.shutdown()
            raise ModelError(f"teacher {self.name}: {error.message}", hint=error.hint) from error
        except BaseException:
            await engine.shutdown()
            raise
        return engine

    async def _keep(self, engine: Engine, _: int) -> None:
        """Let texts be scored until one finds the engine dead."""
        self._engine, self._died = engine, asyncio.Event()
        self._ready.set()
        await self._died.wait()
        raise EngineDeadError(f"teacher {self.name}: {self._death}")

    def _note_end(self, keeper: asyncio.Task[None]) -> None:
        error = None if keeper.cancelled() else keeper.exception()
        self._end = error if isinstance(error, Exception) else ModelError("its worker leaves")
        self._ready.set()


class Served(Model):
    """A model of a server that answers `prompt_logprobs`; any number of workers may ask it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from producer_workers.engines.http.server import CompletionServer  # needs aiohttp

        settings = self._section.settings(self._config)
        assert isinstance(settings, HttpConfig)
        self._server = CompletionServer(settings.url, settings.model, settings.api_key)
        self._is_open = False
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        try:
            await self._connect()
        except ServiceAway as error:
            self._note_away(error)
        except NoAnswer as error:
            raise ModelError(f"teacher {self.name}: {error}") from error

    async def close(self) -> None:
        await self._server.close()

    async def _ask(self, ids: NDArray[np.int32], start: int, top_k: int, limit_s: float) -> Scores:
        await self._connect()
        return await self._score(ids, start, top_k, limit_s)

    async def _connect(self) -> None:
        """Open the connection, once, and check what the server has. Raises as `_ask`."""
        async with self._opening:
            if self._is_open:
                return
            from producer_workers.engines.http.server import HEALTH_S, ServerGone

            try:
                await self._server.open()
                self._check_context(self._server.max_model_len)
                await self._check_tokens()
                await self._score(PROBE, 1, self._section.top_k, HEALTH_S)
            except ServerGone as error:
                await self._server.close()
                raise _answer_of(error) from error
            except BaseException:
                await self._server.close()
                raise
            self._is_open = True

    async def _score(
        self, ids: NDArray[np.int32], start: int, top_k: int, limit_s: float
    ) -> Scores:
        from producer_workers.engines.http.server import ServerGone, ServerRefusal

        try:
            return await self._server.scores(ids.tolist(), start, top_k, limit_s)
        except ServerGone as error:
            raise _answer_of(error) from error
        except ServerRefusal as error:
            if error.status in AWAY:
                raise ServiceAway(error.message, hint=error.hint) from error
            if error.status in RETRIED:
                raise NoAnswer(error.message, hint=error.hint) from error
            raise

    async def _check_tokens(self) -> None:
        """Raise ModelError where the server's tokenizer is another one, if it shows it."""
        if self._section.model:
            folder = self._section.folder(self._config)
            await asyncio.to_thread(check_same_tokens, self.name, self._config.model_folder, folder)
        text, ids = await in_tokenizer_thread(_probe, self._config.model_folder)
        theirs = await self._server.tokenize(text)
        if theirs is not None and theirs != ids:
            raise _other_tokenizer(self.name, f"the server {self._server.url} has other token ids")


def _answer_of(error: Exception) -> NoAnswer:
    """Return the error of a server that is gone: away, or without an answer in time."""
    from producer_workers.engines.http.server import ServerAway

    kind = ServiceAway if isinstance(error, ServerAway) else NoAnswer
    return kind(str(error))


def _probe(model: Path) -> tuple[str, list[int]]:
    """Return a text of many tokens of a model, and its ids."""
    tokenizer: Any = load_tokenizer(str(model))
    spread = np.linspace(0, len(tokenizer) - 1, 512).astype(int)
    text = str(tokenizer.decode(spread.tolist(), skip_special_tokens=True))
    return text, list(tokenizer.encode(text, add_special_tokens=False))


def check_same_tokens(name: str, student: Path, teacher: Path) -> None:
    """Raise ModelError unless each token of the student's tokenizer has the same id in both."""
    if student == teacher:
        return
    mine: dict[str, int] = cast(Any, load_tokenizer(str(student))).get_vocab()
    known: dict[str, int] = cast(Any, load_tokenizer(str(teacher))).get_vocab()
    other = min(((n, token) for token, n in mine.items() if known.get(token) != n), default=None)
    if other is None:
        return
    number, token = other
    names = {n: name for name, n in known.items()}
    theirs = f"is {names[number]!r} in {teacher}" if number in names else f"not in {teacher}"
    raise _other_tokenizer(name, f"token {number} is {token!r} in {student}, {theirs}")


def _other_tokenizer(name: str, why: str) -> ModelError:
    return ModelError(
        f"teacher {name} has another tokenizer: {why}",
        hint="a teacher scores the student's own token ids: take a model of the same family",
    )
