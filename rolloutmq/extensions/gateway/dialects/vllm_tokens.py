"""Parse requests for vLLM's endpoint of tokens in and out, and write their answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from buffer.wire.rollout import PolicyVersion
from rolloutmq.extensions.gateway.dialects.dialect import (
    AgentRequest,
    Fields,
    Json,
    MaxTokens,
    Stop,
    Stops,
    TokenList,
    Tokens,
    as_list,
    data_events,
)
from rolloutmq.extensions.gateway.dialects.openai_chat import usage_of
from rolloutmq.extensions.gateway.turn import Ask, SampledTurn

REFUSED = dict.fromkeys(("features", "content_parts"), "only tokens can be asked")

_UNTRUE = ("allowed_token_ids", "bad_words", "ignore_eos", "logit_bias", "min_tokens")
REFUSED_SAMPLING = {
    **dict.fromkeys(_UNTRUE, "the logprobs would not be the policy's"),
    "prompt_logprobs": "only the logprob of what was sampled is known",
    "structured_outputs": "ask chat completions with response_format",
}


class Sampling(Fields):
    """Fields of vLLM's sampling parameters; the task sets all others."""

    refused = REFUSED_SAMPLING

    n: Literal[1] | None = None
    max_tokens: MaxTokens | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: TokenList | None = None
    logprobs: int | None = Field(None, ge=0, le=1)


class GenerateRequest(AgentRequest):
    path = "/inference/v1/generate"
    refused = REFUSED

    request_id: str = ""
    token_ids: Tokens
    sampling_params: Sampling
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] = "tokens"

    def ask(self) -> Ask:
        sampling = self.sampling_params
        return Ask(
            prompt=self.token_ids,
            max_tokens=sampling.max_tokens,
            stops=as_list(sampling.stop),
            stop_token_ids=sampling.stop_token_ids or (),
        )

    def answer(self, turn: SampledTurn, pieces: list[str]) -> Json:
        return {
            "request_id": self.request_id or turn.name,
            "model": self.model,
            "output_mode": self.output_mode,
            "choices": [self._choice(turn)],
            "prompt_token_ids": self.token_ids if self.return_token_ids else None,
            "usage": usage_of(turn),
        }

    def events(self, turn: SampledTurn, pieces: list[str]) -> Iterator[bytes]:
        return data_events([self.answer(turn, pieces)])

    def _choice(self, turn: SampledTurn) -> Json:
        tokens, logprobs = turn.made.token_ids.tolist(), turn.made.logprobs.tolist()
        sampled = [
            {"token_id": token, "logprob": logprob, "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        versions = [(str(PolicyVersion(s.lineage, s.version)), s) for s in turn.made.spans]
        return {
            "index": 0,
            "finish_reason": turn.made.finish_reason,
            "stop_reason": turn.stop or None,
            "token_ids": tokens,
            "logprobs": None if self.sampling_params.logprobs is None else {"content": sampled},
            "weight_versions": [
                {"version": name, "start": span.start, "end": span.start + span.length}
                for name, span in versions
            ],
        }
