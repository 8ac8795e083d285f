"""An engine that notes what a gateway's sessions read and said, and the loop around it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.imports import load_object
from buffer.wire.rollout import RolloutState, VersionSpan
from buffer.wire.sampling import SampleParams
from buffer.wire.sampling_mask import SamplingMask
from producer_workers.engines.base import EngineDeadError, FinishReason, Generation
from rolloutmq.extensions.gateway.loop import GatewayAgentLoop
from tests.producer_workers.letter_engine import LetterEngine

MINE = "tests.producer_workers.agents:"


class Recorder(LetterEngine):
    """Makes the turns of a script, or random bytes that no tokenizer would give back; records all.

    Every token has a logprob and a set of its own, every request weights of its own. `cut` are sessions that
    are aborted when they ask for the second time.
    """

    def __init__(self, tokenizer: Any, script: list[str] | None = None) -> None:
        super().__init__(tokenizer, np.empty(0, "<i4"))
        self.tokenizer = tokenizer
        self.dice = np.random.default_rng(0)
        self.lines = script
        self.read: list[NDArray[np.int32]] = []
        self.said: list[Generation] = []
        self.cut: set[int] = set()
        self.dead = False
        self.max_model_len: int | None = None

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        self.requests.append((request_id, len(prompt_ids), params))
        await self._hang()
        await asyncio.sleep(0.001)
        if self.dead:
            raise EngineDeadError("gone")
        _, session, *_, request = request_id.split("/")
        if int(session) in self.cut and int(request) > 0:
            return Generation(np.array([5], "<i4"), np.zeros(1, "<f4"), (), "abort")
        number = len(self.said)
        if self.lines is None:
            ids = [
                *self.dice.integers(3, 259, self.dice.integers(1, 9)).tolist(),
                self.tokenizer.eos_token_id,
            ]
        else:
            ids = [*self.tokens_of(self.lines[number]), self.tokenizer.eos_token_id]
        cut = ids[: params.max_tokens]
        logprobs = (-number - np.arange(len(cut)) / 1024).astype("<f4")
        spans = (VersionSpan(0, len(cut), number, self.now.lineage),)
        reason: FinishReason = "stop" if len(cut) == len(ids) else "length"
        sets = np.column_stack([cut, np.full(len(cut), number)]).astype("<i4")
        mask = SamplingMask(np.full(len(cut), 2, "<i4"), sets.ravel())
        made = Generation(
            np.array(cut, "<i4"), logprobs, spans, reason, columns={"sampling_mask": mask}
        )
        self.read.append(prompt_ids.copy())
        self.said.append(made)
        return made

    def tokens_of(self, line: str) -> list[int]:
        """Return a line behind a token that is no text: agents send it back as other tokens."""
        return [self.tokenizer.get_vocab()["ÿ"], *self.tokenizer.encode(line)]

    def check(self, states: list[RolloutState], untrained: Collection[int] = ()) -> None:
        """Check that exactly what was read and sampled is there, each token trained once.

        `untrained`: the numbers of requests that are context alone.
        """
        whole, trained = [], []
        for state in states:
            assert state.prompt_ids is not None
            assert state.response_mask is not None
            whole.append(np.concatenate([state.prompt_ids, state.response_ids]).tolist())
            places = np.flatnonzero(state.response_mask)
            versions = {
                n: s.version for s in state.spans for n in range(s.start, s.start + s.length)
            }
            assert sorted(versions) == places.tolist()
            assert not state.logprobs[state.response_mask == 0].any()
            trained += [
                (versions[n], int(state.response_ids[n]), float(state.logprobs[n]))
                for n in places.tolist()
            ]
        sampled = []
        for number, (read, made) in enumerate(zip(self.read, self.said, strict=True)):
            context = [*read.tolist(), *made.token_ids.tolist()]
            assert any(ids[: len(context)] == context for ids in whole), (
                f"request {number} is in no rollout"
            )
            if number not in untrained:
                pairs = zip(made.token_ids.tolist(), made.logprobs.tolist(), strict=True)
                sampled += [(number, token, logprob) for token, logprob in pairs]
        assert sorted(trained) == sorted(sampled)
        assert (
            len(
                {
                    tuple(state.prompt_ids.tolist())
                    for state in states
                    if state.prompt_ids is not None
                }
            )
            == 1
        )


def loop_of(tokenizer: Any, agent: Any = "wander", **options: Any) -> GatewayAgentLoop:
    if isinstance(agent, str) and ":" not in agent:
        agent = load_object(MINE + agent, kind="agent")  # not by name, for a process of its own
    common = {
        "judge": None,
        "tokenizer": tokenizer,
        "eos_ids": [tokenizer.eos_token_id],
        "agent": agent,
    }
    return GatewayAgentLoop(**{**common, **options})


def questions(*texts: str, **params: Any) -> list[RolloutState]:
    sampling = SampleParams(seed=7, **params)
    return [
        RolloutState(index=n, messages=[{"role": "user", "content": text}], sample_params=sampling)
        for n, text in enumerate(texts)
    ]


def run(
    loop: GatewayAgentLoop, engine: Any, states: list[RolloutState], keeper: Any = None
) -> list[RolloutState]:
    """Return the rollouts; [] if the worker of `keeper` died."""

    async def scene() -> list[RolloutState]:
        making = asyncio.create_task(
            loop.generate_group(states, engine, "math-0000000001", keeper=keeper)
        )
        died = asyncio.create_task(keeper.died.wait() if keeper else asyncio.Event().wait())
        try:
            await asyncio.wait([making, died], return_when=asyncio.FIRST_COMPLETED)
            is_dead = died.done()
            died.cancel()
            if is_dead:
                making.cancel()
                await asyncio.gather(making, return_exceptions=True)
                return []
            made = await making
        finally:
            await loop.close()
        for _ in range(10):  # the agents' clients close their connections
            await asyncio.sleep(0.01)
        return made

    return asyncio.run(scene())
