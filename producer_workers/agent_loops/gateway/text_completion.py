"""POST /v1/completions: a text, or the tokens themselves, in; what comes behind it out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from producer_workers.agent_loops.gateway.dialect import Json, Request, usage
from producer_workers.agent_loops.gateway.session import Session, Turn

Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]

USUAL_TOKENS = 16
"""As that API has it."""


class TextRequest(Request):
    prompt: Annotated[str, Field(min_length=1)] | Tokens
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0)
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _only_one(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ValueError("one prompt at a time can be asked")
            return prompt[0]
        return prompt

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    async def ask(self, session: Session) -> Turn:
        return await session.complete(self.prompt, self.wishes(self.max_tokens or USUAL_TOKENS))

    def answer(self, turn: Turn, name: str, pieces: list[str]) -> Json:
        choice = self._choice(turn, pieces) | {"finish_reason": turn.made.finish_reason}
        return self.frame(f"cmpl-{name}", "text_completion") | {"choices": [choice], "usage": usage(turn)}

    def chunks(self, turn: Turn, name: str, pieces: list[str]) -> Iterator[Json]:
        frame = self.frame(f"cmpl-{name}", "text_completion") | self.no_usage
        yield frame | {"choices": [self._choice(turn, pieces) | {"finish_reason": turn.made.finish_reason}]}
        if self.wants_usage:
            yield frame | {"choices": [], "usage": usage(turn)}

    def _choice(self, turn: Turn, pieces: list[str]) -> Json:
        return {"index": 0, "text": turn.message["content"], "logprobs": self._logprobs(turn, pieces)}

    def _logprobs(self, turn: Turn, pieces: list[str]) -> Json | None:
        if self.logprobs is None:
            return None
        values = turn.made.logprobs.tolist()
        starts = list(accumulate(map(len, pieces), initial=0))[:-1]
        return {"tokens": pieces, "token_logprobs": values, "top_logprobs": None, "text_offset": starts}
