"""An engine whose every answer is known: for tests of what is done around an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.wire.rollout import PolicyVersion, VersionSpan
from buffer.wire.sampling import SampleParams
from producer_workers.engines.base import Generation

ANSWER = "the answer is 42"


class LetterEngine:
    """Says `ANSWER` and ends, letter by letter, from wherever prompt and tokens leave off.

    `abort_at` cuts every request when the response has that many tokens; `broken` raises for one
    rollout.
    """

    name = "letters"

    def __init__(
        self, tokenizer: Any, prompt: NDArray[np.int32], abort_at: int | None = None
    ) -> None:
        self.script = [*tokenizer.encode(ANSWER), tokenizer.eos_token_id]
        self.prompt = prompt
        self.abort_at = abort_at
        self.now = PolicyVersion("a", 0)
        self.requests: list[tuple[str, int, SampleParams]] = []
        self.broken: dict[int, Exception] = {}
        self.hangs = False
        self.cancelled = 0

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        done = len(prompt_ids) - len(self.prompt)
        assert prompt_ids[: len(self.prompt)].tolist() == self.prompt.tolist()
        assert prompt_ids[len(self.prompt) :].tolist() == self.script[:done]
        self.requests.append((request_id, done, params))
        if error := self.broken.get(int(request_id.split("/")[1])):
            raise error
        await self._hang()
        end = min(len(self.script), done + params.max_tokens)
        reason: Any = "stop" if end == len(self.script) else "length"
        if self.abort_at is not None and self.abort_at < end:
            end = max(done, self.abort_at)
            reason = "abort"
        ids = np.array(self.script[done:end], "<i4")
        spans = (VersionSpan(0, len(ids), self.now.version, self.now.lineage),) if len(ids) else ()
        return Generation(ids, -np.arange(done, end, dtype="<f4"), spans, reason)

    async def _hang(self) -> None:
        try:
            await (asyncio.Event().wait() if self.hangs else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def version(self) -> PolicyVersion:
        return self.now

    async def start(self) -> None: ...
    async def pause(self, mode: str) -> None: ...
    async def resume(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def load_weights(self, path: Path, version: PolicyVersion) -> None: ...
    def check_health(self) -> None: ...
    async def shutdown(self) -> None: ...
