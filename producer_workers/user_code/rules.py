"""Define how the calls of one function are named and limited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from buffer.errors import RolloutMQError, UserCodeError, describe
from producer_workers.user_code.border import Border
from producer_workers.user_code.user_frames import user_frames

Mode = Literal["plain", "coroutines", "threads"]
"""How a process makes calls: one after the other; many in its event loop; many in threads."""

ROOM: dict[Mode, int] = {"plain": 1, "coroutines": 64, "threads": 16}
"""Calls that one process makes at once."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call has no result. It crosses from the process of a function to its caller."""

    said: str
    told: str
    """what a model gets to read of it"""
    hint: str = ""
    frames: str = ""
    """where it was raised in the user's code, the innermost last, one a line"""
    is_own: bool = False
    """whether `said` is of this project, and names the function"""
    is_out_of_memory: bool = False

    @classmethod
    def of(cls, error: BaseException, border: Border) -> Failure:
        """Return why a call that raised `error` has no result."""
        frames = "\n".join(user_frames(error))
        if isinstance(error, RolloutMQError):
            return cls(error.message, border.told(error), error.hint, frames, is_own=True)
        empty = isinstance(error, StopIteration)
        hint = "next(...) found nothing: give it a default" if empty else ""
        is_memory = isinstance(error, MemoryError)
        return cls(describe(error), border.told(error), hint, frames, is_out_of_memory=is_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How one function is called, and what errors say of it.

    `what`: kind and name. `limit_s`: of each call. `memory_mb`: address space of a process, 0 for
    no limit. `limit_key`, `memory_key`: the settings of these. `repeats`: a call is made again,
    alone, where its process ended, perhaps for another call's fault. `grace_s`: time in which a
    call that is not wanted any more must end, where its process makes others, too.
    """

    what: str
    name: str
    limit_s: float
    limit_key: str
    memory_mb: int = 0
    memory_key: str = ""
    processes: int = 1
    mode: Mode = "plain"
    repeats: bool = True
    grace_s: float = 1.0
    start_s: float = 300.0
    """time in which a process must have imported the function"""
    error: type[UserCodeError] = UserCodeError
    hint: str = ""
    """what to do about an exception, where nothing better is known"""

    def failed(self, failure: Failure) -> UserCodeError:
        """Return the error of a call that failed."""
        said = failure.said if failure.is_own else f"{self.what} raised {failure.said}"
        hint = failure.hint if failure.is_own else failure.hint or self.hint
        if failure.is_out_of_memory and self.memory_key:
            hint = f"see {self.memory_key}"
        return self.error(said, hint=hint, told=failure.told, frames=failure.frames)

    def over_limit(self) -> UserCodeError:
        """Return the error of a call that took too long."""
        return self.error(
            f"{self.what} exceeded its limit of {self.limit_s:g} s",
            hint=f"raise {self.limit_key}, or make it faster"
            if self.limit_key
            else "make it faster",
            told=f"{self.name} took longer than {self.limit_s:g} s",
        )

    def ended(self, how: str) -> UserCodeError:
        """Return the error of a call that ended its process."""
        return self.error(
            f"{self.what} ended its process: {how}",
            hint="see the log of this process",
            told=f"{self.name} ended its process: {how}",
        )
