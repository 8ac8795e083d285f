"""Keeps a worker's control line open, on its event loop: what it hears is adopted, what was carried out is said (I10).

While there is no line the worker is deaf, and the heartbeat hears and says the same, only later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import redis

from buffer.control import ControlState
from buffer.control_line import ControlLine
from buffer.errors import ScriptError
from buffer.run import Run
from producer_workers.heard_control import HeardControl

log = logging.getLogger("rolloutmq.worker")

AGAIN_S = 1.0
"""Between two tries to open a line."""


class Listener:
    """Of one registration. `poke` makes the heart beat at once."""

    def __init__(self, run: Run, worker: str, nonce: str, control: HeardControl, poke: Callable[[], None]) -> None:
        self._run, self._worker, self._nonce = run, worker, nonce
        self._control, self._poke = control, poke
        self._line: ControlLine | None = None
        self._broken = asyncio.Event()

    @asynccontextmanager
    async def listening(self, fail: Callable[[BaseException | None], object]) -> AsyncIterator[None]:
        """Listen during the block; `fail` hears of what should not have happened."""
        task = asyncio.create_task(self.listen(), name="listener")
        task.add_done_callback(lambda done: done.cancelled() or fail(done.exception()))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def listen(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                line = await asyncio.to_thread(self._run.fleet.open_line, self._worker, self._nonce)
            except redis.RedisError as error:
                log.debug("deaf for a while: %s", error)
            else:
                await self._hold(line)
            await asyncio.sleep(AGAIN_S)

    async def _hold(self, line: ControlLine) -> None:
        loop = asyncio.get_running_loop()
        self._line = line
        self._broken.clear()
        loop.add_reader(line.fileno(), self._hear)
        try:
            # subscribe first, then ask, leaves no gap
            self.hand_in()
            await self._broken.wait()
        finally:
            loop.remove_reader(line.fileno())
            self._line = None
            line.close()

    def hand_in(self) -> None:
        """Say what was carried out."""
        if self._line is None:
            self._poke()
            return
        try:
            self._line.say(self._control.ack, self._control.epoch)
        except redis.RedisError as error:
            self._break(error)

    def _hear(self) -> None:
        try:
            if self._line:
                self._line.hear(self._control.hear_hint, self._answered)
        except (redis.RedisError, ScriptError) as error:
            self._break(error)

    def _answered(self, state: ControlState | None, ack: int, heard: int) -> None:
        if state is None:
            self._poke()  # the heart knows what to do about it
            return
        self._control.hear_receipt(ack)
        self._control.hear_answer(state, heard)

    def _break(self, error: Exception) -> None:
        log.debug("the control line broke: %s", error)
        self._broken.set()
        self._poke()
