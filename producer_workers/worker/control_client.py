"""Keeps a worker's control line open, on its event loop: what it hears is adopted, what was carried
out is said (I10).

While there is no line the worker is deaf, and the heartbeat hears and says the same, only later.

What a worker has heard of the control state, and what it has said of it (I10).

Answers of the server are always right, also where a server that rolled back counts from an older
epoch; hints are not, and are only taken when they are newer. An answer to what was asked before a
hint came is older than the hint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import redis

from buffer.control.control import ControlState, Mode
from buffer.control.control_line import ControlLine
from buffer.errors import ScriptError
from buffer.run import Run


class HeardControl:
    """`state` is the newest one heard; `ack` the epoch carried out; `receipt` the one that the
    server knows as carried out. `changed` is called after every change of `state`, and of `receipt`
    where something may be claimed then.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self.state: ControlState | None = None
        self.ack = self.receipt = 0

    @property
    def epoch(self) -> int:
        return self.state.epoch if self.state else 0

    @property
    def mode(self) -> Mode | None:
        return self.state.mode if self.state else None

    @property
    def obeyed(self) -> bool:
        return self.state is not None and self.ack == self.state.epoch

    def hear_hint(self, state: ControlState) -> None:
        if self.state is not None and state.epoch > self.epoch:
            self._adopt(state)

    def hear_answer(self, state: ControlState, asked: int) -> None:
        """`asked`: `epoch` when the question was sent."""
        if asked == self.epoch or state.epoch > self.epoch:
            self._adopt(state)

    def hear_receipt(self, ack: int) -> None:
        """The server was told that `ack` is carried out. Of two answers, the older one does not
        undo the newer.
        """
        if self.state is None or self.receipt == self.epoch:
            return
        self.receipt = ack
        if ack == self.epoch and self.mode is not Mode.RUN and self.state.lanes:
            self._changed()  # only now may lanes that are open be claimed from

    def _adopt(self, state: ControlState) -> None:
        if self.state is None or state.epoch != self.epoch:
            self.state = state
            self._changed()


log = logging.getLogger("rolloutmq.worker")

AGAIN_S = 1.0
"""Between two tries to open a line."""


class Listener:
    """Of one registration. `poke` makes the heart beat at once."""

    def __init__(
        self, run: Run, worker: str, nonce: str, control: HeardControl, poke: Callable[[], None]
    ) -> None:
        self._run = run
        self._worker = worker
        self._nonce = nonce
        self._control = control
        self._poke = poke
        self._line: ControlLine | None = None
        self._broken = asyncio.Event()

    @asynccontextmanager
    async def listening(
        self, fail: Callable[[BaseException | None], object]
    ) -> AsyncIterator[None]:
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
