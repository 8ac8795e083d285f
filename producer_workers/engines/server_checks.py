"""What a server does, by experiment, since no API says it: what its logprobs are of, if it keeps to a structure."""

from __future__ import annotations

from producer_workers.engines.base import EngineError, GenerationError
from producer_workers.engines.completion_server import CompletionServer, ServerRefusal

PROBES = ([11, 12, 13], [21, 3, 8, 5], [7])
ENOUGH = 1e-3
"""Logprobs that are nearer to each other, in nats, say nothing."""


async def check_logprobs(server: CompletionServer) -> None:
    """Raises EngineError unless tokens come with ids, and with logprobs of what they were drawn from.

    Half the temperature doubles the distance between two logprobs; where they are taken before it, nothing moves.
    """
    try:
        async for _ in server.stream(PROBES[0], {"max_tokens": 1}):
            pass
    except GenerationError as error:
        raise EngineError(error.message, hint=error.hint) from error
    for prompt in PROBES:
        plain, cold = [await server.top_logprobs(prompt, temperature) for temperature in (1.0, 0.5)]
        near, far = plain[-1] - plain[0], cold[-1] - cold[0]
        if near <= ENOUGH:
            continue
        if far < 1.5 * near:
            hint = "start vLLM with --logprobs-mode processed_logprobs"
            raise EngineError(f"{server.url} reports logprobs before temperature and top-p", hint=hint)
        return
    raise EngineError(f"{server.url} gave the same logprob to any two tokens", hint="is it a language model?")


async def keeps_to_a_structure(server: CompletionServer) -> bool:
    """Whether `structured_outputs` counts: most servers pass over a field that they do not know."""
    only = "a7-b8"
    try:
        said = await server.text(PROBES[0], {"max_tokens": 16, "structured_outputs": {"choice": [only]}})
    except ServerRefusal:
        return False
    return said == only
