"""One look a second at the run, shared by all browsers, and none while nobody watches.

The text of single tokens, for the colours of the rollout viewer, where a tokenizer of the run can
be read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from buffer.errors import RolloutMQError
from buffer.monitoring.history import History
from buffer.monitoring.json_views import describe
from buffer.monitoring.run_view import Snapshot, take_snapshot
from buffer.run import Run

EVERY_S = 1.0
EVENTS = 12
CURVE = 200
"""Points of a curve that a browser is given when it comes."""


class Watcher:
    """`looks` yields what a browser shows, at most one every EVERY_S, whoever asks."""

    def __init__(self, run: Run, history: History, is_over: Callable[[], bool]) -> None:
        self._run = run
        self._history = history
        self._is_over = is_over
        self._lock = asyncio.Lock()
        self._newest: dict[str, Any] = {}
        self._looked_at = float("-inf")

    async def looks(self) -> AsyncIterator[dict[str, Any]]:
        """A look now, and one every second, until `is_over`."""
        while not self._is_over():
            yield await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> dict[str, Any]:
        """The newest look; a new one where that is older than EVERY_S. A server that is away is
        told as `trouble`.
        """
        async with self._lock:
            if time.monotonic() - self._looked_at >= 0.9 * EVERY_S:
                self._newest = await asyncio.to_thread(self._look)
                self._looked_at = time.monotonic()
            return self._newest

    def _look(self) -> dict[str, Any]:
        try:
            snap = take_snapshot(self._run, events=EVENTS)
        except RolloutMQError as error:
            return self._newest | {"trouble": error.message, "hint": error.hint}
        self._history.observe(snap)
        return {"trouble": "", "now_ms": snap.now_ms, "status": describe(snap)} | self._of_history(
            snap
        )

    def _of_history(self, snap: Snapshot) -> dict[str, Any]:
        history = self._history
        curves = {
            name: history.metric(name)[-CURVE:]
            for name in ("rewards/mean", "staleness/mean", "time/step_s")
        }
        return {
            "waits": {
                wait: {"now": now, "share": history.share(wait)}
                for wait, now in history.waits.items()
            },
            "curves": curves | {"tokens_per_s": list(history.token_rates)[-CURVE:]},
            "events": [
                {"at_ms": at_ms, "event": name, **fields} for at_ms, name, fields in snap.events
            ],
        }


class TokenTexts:
    """`folders`: where a tokenizer may be, of the run's model or of any of its weights. Where none
    is, tokens are shown by their ids.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._files = [folder / "tokenizer.json" for folder in folders]

    @cached_property
    def _tokenizer(self) -> Any:
        file = next((path for path in self._files if path.is_file()), None)
        if file is None:
            return None
        try:
            from tokenizers import Tokenizer
        except ImportError:  # an extra; ids are shown
            return None
        return Tokenizer.from_file(str(file))

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """The text of each token by itself; None where nobody knows."""
        if self._tokenizer is None:
            return None
        return [str(self._tokenizer.decode([token], skip_special_tokens=False)) for token in ids]
