"""What a worker has heard of the control state, and what it has said of it (I10).

Answers of the server are always right, also where a server that rolled back counts from an older epoch; hints are not,
and are only taken when they are newer. An answer to what was asked before a hint came is older than the hint.
"""

from __future__ import annotations

from collections.abc import Callable

from buffer.control import ControlState, Mode


class HeardControl:
    """`state` is the newest one heard; `ack` the epoch carried out; `receipt` the one that the server knows as carried
    out. `changed` is called after every change of `state`, and of `receipt` where something may be claimed then."""

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
        """The server was told that `ack` is carried out. Of two answers, the older one does not undo the newer."""
        if self.state is None or self.receipt == self.epoch:
            return
        self.receipt = ack
        if ack == self.epoch and self.mode is not Mode.RUN and self.state.lanes:
            self._changed()  # only now may lanes that are open be claimed from

    def _adopt(self, state: ControlState) -> None:
        if self.state is None or state.epoch != self.epoch:
            self.state = state
            self._changed()
