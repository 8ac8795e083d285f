"""Call a user's function in processes of this one, which are killed if it hangs.

call ──▶ a process with room, or a new one ──▶ answer
             │ idle since a call that failed: a new process imports the code, which may be mended
             │ over its limit, or interrupted: a plain function's process is killed,
             │                                 a coroutine is cancelled, or else killed
             └ ended by itself (os._exit, a crash), or killed because nothing in it runs: each of
               its calls is repeated alone, in a process of its own, since another may be the
               cause; the second end is its own
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from buffer.errors import RolloutMQError
from producer_workers.user_code.border import ROOM, Rules, is_marked_inline, load_border
from producer_workers.user_code.function_server import Order
from producer_workers.user_code.user_function import TURNS, UserFunction
from producer_workers.user_code.user_process import Ended, UserProcess

# Calls a user's function, here or in another process. Raises the error of its rules only.
Call = Callable[..., Awaitable[Any]]

# Returns new arguments for a call that is repeated because its process ended.
Again = Callable[[], tuple[Any, ...]]

END_S = 5.0  # time for the functions that are called from threads to end with this process

_OPEN = weakref.WeakSet["UserFunction | ProcessFunction"]()

CROWD = 8  # calls in one process from which on another one starts, up to the allowed number


class ProcessFunction:
    """Calls the function at `path`, of the kind of `border`, in processes that start when needed.

    `options`: arguments for `Border.load`.
    """

    def __init__(
        self, path: str, border: str, rules: Rules, options: Mapping[str, Any] | None = None
    ) -> None:
        self._border = load_border(border)
        self._rules = rules
        self._order = Order(
            path=path, border=border, options=dict(options or {}), name=rules.name,
            memory_mb=rules.memory_mb, mode=rules.mode, parent=os.getpid(), fd=-1,
        )  # fmt: skip
        self._turns = asyncio.Semaphore(rules.processes * ROOM[rules.mode])
        self._alone = asyncio.Semaphore(rules.processes)
        self._processes: list[UserProcess] = []

    async def __call__(self, *arguments: Any, again: Again | None = None) -> Any:
        """Return the checked result. `again` makes the arguments of a repeated call.

        Raises the rules' error for any fault of the function, and ProcessUnavailable if it cannot
        be called.
        """
        frame = self._write(arguments)
        async with self._turns:
            process = self._with_room()
            with suppress(Ended):
                return await process.ask(frame)
        async with self._alone:
            frame = self._write(again()) if again else frame
            process = self._start(is_shared=False)
            try:
                return await process.ask(frame)
            except Ended as end:
                raise self._rules.ended(str(end)) from end
            finally:
                process.end("its only call is over", is_fault=False)

    def close(self) -> None:
        for process in self._processes:
            process.end("its calls are over", is_fault=False)

    def _write(self, arguments: tuple[Any, ...]) -> bytes:
        try:
            return self._border.write(*arguments)
        except (RolloutMQError, TypeError, ValueError, OverflowError, RecursionError) as error:
            hint = getattr(error, "hint", "")
            raise self._rules.error(
                f"{self._rules.what} could not be asked: {error}", hint=hint
            ) from error

    def _with_room(self) -> UserProcess:
        for process in self._processes:
            process.end_if_mended()
        self._processes = [process for process in self._processes if not process.is_ended]
        fitting = [process for process in self._processes if process.room > 0]
        found = max(fitting, key=lambda process: process.room, default=None)
        is_crowded = found is not None and found.room <= ROOM[self._rules.mode] - CROWD
        if found is None or (is_crowded and len(self._processes) < self._rules.processes):
            found = self._start(is_shared=ROOM[self._rules.mode] > 1)
            self._processes.append(found)
        return found

    def _start(self, *, is_shared: bool) -> UserProcess:
        return UserProcess(self._order, self._border, self._rules, is_shared=is_shared)


def call_of(
    function: Any,
    border: str,
    rules: Rules,
    *,
    path: str | None,
    options: Mapping[str, Any] | None = None,
    turns: int = TURNS,
) -> UserFunction | ProcessFunction:
    """Return what calls a user's function: in processes, which import it by `path`.

    Without a path, or if it is declared to run inline, it is called here, in up to `turns` threads.
    """
    if path is not None and not is_marked_inline(function):
        return ProcessFunction(path, border, rules, options)
    kind = load_border(border)
    return UserFunction(kind.prepare(function, options or {}), kind, rules, turns=turns)


class BlockingCall:
    """Calls a function from threads without an event loop: of a producer, or of submits."""

    def __init__(self, call: UserFunction | ProcessFunction) -> None:
        self._call = call
        _OPEN.add(call)
        weakref.finalize(self, _close, call).atexit = False  # see _settle

    def __call__(self, *arguments: Any) -> Any:
        async def ask() -> Any:
            return await self._call(*arguments)

        return asyncio.run_coroutine_threadsafe(ask(), _background_loop()).result()


def _close(call: UserFunction | ProcessFunction) -> None:
    _background_loop().call_soon_threadsafe(call.close)


@cache
def _background_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop in a thread that lives as long as this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="user-functions", daemon=True).start()
    atexit.register(_end, loop)
    return loop


def _end(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(_settle(), loop).result(END_S)


async def _settle() -> None:
    """End all processes, and the tasks that read from them."""
    for call in list(_OPEN):
        call.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
