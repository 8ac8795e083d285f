"""Limits that change while the run goes on: staleness, tries, and the marks of its memory (I8, I11,
I12).
"""

from __future__ import annotations

import pytest

from buffer.errors import ConfigError
from buffer.run.settings import LiveSettings
from tests.buffer.histories.world import World

NO_MARK = 10**9


class SettingsMoves(World):
    def set_staleness(self, max_staleness: int) -> None:
        wanted = LiveSettings(max_staleness=max_staleness)
        if self.tokens is not None and max_staleness + 1 != self.threshold:
            with pytest.raises(ConfigError):
                self.scene.run.set(wanted)
            return
        self.scene.run.set(wanted)
        self.threshold = max_staleness + 1

    def set_tries(self, max_tries: int) -> None:
        self.scene.run.set(LiveSettings(max_tries=max_tries))
        self.max_tries = max_tries

    def set_marks(self, low: int, between: int) -> None:
        """Payload bytes from which nothing new, and from which nothing at all is started."""
        self.scene.run.set(LiveSettings(low_bytes=low, high_bytes=low + between))
        self.low = low
        self.high = low + between

    def lift_marks(self) -> None:
        if self.low != NO_MARK:
            self.set_marks(NO_MARK, 0)
