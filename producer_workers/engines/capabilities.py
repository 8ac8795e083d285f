"""What an engine may do beyond `Engine`. One that cannot is worked around, so yours need not."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable


@runtime_checkable
class AbortsSome(Protocol):
    """It can end some requests and go on with the others. Without it, nothing is aborted while a group is protected."""

    async def abort_others(self, spared: Collection[str]) -> None:
        """Requests of all groups but `spared` return what they have, with finish_reason "abort". The group of a request
        is what stands before the first "/" of its id. May be called again and again; the engine is not paused by it."""
