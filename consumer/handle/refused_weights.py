"""Whether workers can load the published weights: one that cannot claims nothing."""

from __future__ import annotations

import logging
import time

from buffer.control.control import ControlState
from buffer.control.fleet import Refusals
from buffer.errors import WeightsRefused
from buffer.run import Run

log = logging.getLogger("rolloutmq.consumer")

REFUSAL_S = 60.0
"""How long a trainer waits while every live worker refuses the weights: a shared folder may show
new files late, and workers try again.
"""


class RefusalWatch:
    """Logs refusals of the newest weights once, and ends a wait that only better weights end."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._logged = ""
        self._since_s: float | None = None

    def check(self, state: ControlState) -> None:
        """Raise WeightsRefused if no live worker has been able to load the weights for a time."""
        found = self._run.fleet.refusals(state.weights)
        if not found.reasons:
            self._since_s = None
            return
        if self._logged != str(state.weights):
            self._logged = str(state.weights)
            log.error("%s; %s", found, _hint(state))
        if not found.are_all:
            self._since_s = None
            return
        self._since_s = time.monotonic() if self._since_s is None else self._since_s
        if time.monotonic() - self._since_s >= REFUSAL_S:
            raise _refused(state, found)


def _hint(state: ControlState) -> str:
    return (
        "publish a complete folder of the model that the workers were started with, at a path that "
        f"they can read ({state.weights_path})"
    )


def _refused(state: ControlState, found: Refusals) -> WeightsRefused:
    return WeightsRefused(
        f"no worker can generate groups: {found}",
        hint=f"{_hint(state)}; `publish` writes and announces one",
        command_hint=_hint(state),
    )
