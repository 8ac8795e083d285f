"""The worker's view of the control state, and the connection that keeps it current (I10).

While the connection is down, heartbeats bring the state and carry the receipts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import redis

from buffer.control.control import ControlState, Mode
from buffer.control.control_line import ControlConnection
from buffer.errors import RunDamaged
from buffer.run.run import Run
from producer_workers.worker.inbox import HintReceived, Inbox, PartEnded, ReceiptAnswered, Signal

log = logging.getLogger("rolloutmq.worker")


class ControlView:
    """The control state as a worker knows it. `ack`: the epoch that it carried out.

    `receipt`: the epoch that the server knows as carried out. Answers always hold, even of a server
    that rolled back; hints only if they are newer. Each `receive_` method returns whether there is
    work to do.
    """

    def __init__(self) -> None:
        self.state: ControlState | None = None
        self.epoch = self.ack = self.receipt = 0
        self.mode: Mode | None = None

    @property
    def is_carried_out(self) -> bool:
        return self.state is not None and self.ack == self.epoch

    def receive_hint(self, state: ControlState) -> bool:
        return self.state is not None and state.epoch > self.epoch and self._adopt(state)

    def receive_answer(self, state: ControlState, known_epoch: int) -> bool:
        """Adopt an answer. `known_epoch`: `epoch` when the worker asked."""
        # an answer to a question from before a hint is older than the hint
        return (known_epoch == self.epoch or state.epoch > self.epoch) and self._adopt(state)

    def receive_receipt(self, ack: int) -> bool:
        """Note that the server knows epoch `ack` as carried out."""
        # of two answers, the older one does not undo the newer
        if self.state is None or self.receipt == self.epoch:
            return False
        self.receipt = ack
        # in a pause, only now may jobs be claimed from the lanes that are open
        return ack == self.epoch and self.mode is not Mode.RUN and bool(self.state.lanes)

    def _adopt(self, state: ControlState) -> bool:
        if self.state is not None and state.epoch == self.epoch:
            return False
        self.state = state
        self.mode = state.mode
        # last: the heartbeat's thread must not name an epoch whose state it cannot see
        self.epoch = state.epoch
        return True


@dataclass(eq=False)
class ControlClient:
    """Keeps the control line of one registration open: hints come in, receipts go out.

    It lives on the worker's event loop and needs no thread.
    """

    _run: Run
    _worker: str
    _nonce: str
    _control: ControlView
    _inbox: Inbox
    _line: ControlConnection | None = field(default=None, init=False)
    _broken: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Keep a line open during the block. PartEnded reports an unexpected end."""
        task = asyncio.create_task(self.listen(), name="control-client")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def listen(self) -> None:
        """Open a line, and another one whenever it breaks, until cancelled."""
        try:
            while True:
                await self._hold()
                await asyncio.sleep(1.0)
        except Exception as error:
            self._inbox.post(PartEnded(error))

    async def _hold(self) -> None:
        opening = asyncio.ensure_future(
            asyncio.to_thread(
                ControlConnection, self._run.store, self._run.keys, self._worker, self._nonce
            )
        )
        try:
            line = await asyncio.shield(opening)
        except asyncio.CancelledError:  # the thread cannot be ended
            with suppress(redis.RedisError):
                (await opening).close()
            raise
        except redis.RedisError as error:
            log.debug("no control line for now, heartbeats carry the control state: %s", error)
            return
        loop = asyncio.get_running_loop()
        self._line = line
        self._broken.clear()
        loop.add_reader(line.fileno(), self._receive)
        try:
            # its answer brings the state; the line has subscribed by now, so no change is missed
            self.send_receipt()
            await self._broken.wait()
        finally:
            loop.remove_reader(line.fileno())
            self._line = None
            line.close()

    def send_receipt(self) -> bool:
        """Send the acknowledged epoch. Return False if a heartbeat must do that."""
        if self._line is None:
            return False
        try:
            self._line.send_receipt(self._control.ack, self._control.epoch)
        except redis.RedisError as error:
            self._break(error)
        return True

    def _receive(self) -> None:
        post = self._inbox.post
        try:
            if self._line:
                self._line.receive(
                    lambda state: post(HintReceived(state)),
                    lambda state, ack, known: post(ReceiptAnswered(state, ack, known)),
                )
        except (redis.RedisError, RunDamaged) as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        log.debug("the control line broke: %s", error)
        self._broken.set()
        self._inbox.post(Signal.CONTROL_LINE_BROKEN)
