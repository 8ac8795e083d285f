"""Sample from a small model, with the same tokens for the same weights and seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.learning.sums import SUMS, Problems
from buffer.ids import split_group_id
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState, Status, VersionSpan
from consumer.grpo.models.model_folder import load_model, load_tokenizer


class Sampler:
    """Holds one version of the weights, and answers the problem of a draw `k` times."""

    def __init__(self, model_dir: Path, k: int, seed: int, problems: Problems = SUMS) -> None:
        self._tokenizer = load_tokenizer(model_dir)
        self._model = load_model(model_dir).eval()
        self._end = int(self._tokenizer.eos_token_id)
        self._k = k
        self._seed = seed
        self._problems = problems

    def load(self, folder: Path) -> None:
        self._model = load_model(folder).eval()

    def prompt(self, gid: str) -> RolloutGroup:
        """Return the INIT group of a draw."""
        task, draw = split_group_id(gid)
        asked = self._problems.demonstrate(draw, self._seed)
        ids = self._tokenizer.apply_chat_template(
            asked.messages, add_generation_prompt=True, return_dict=True
        )
        prompt = np.array(ids["input_ids"], "<i4").reshape(-1)
        states = [
            RolloutState(
                index=i, prompt_ids=prompt, messages=asked.messages, ground_truth=asked.answer
            )
            for i in range(self._k)
        ]
        return RolloutGroup(gid, task, states)

    def answer(self, groups: Sequence[RolloutGroup], weights: PolicyVersion) -> list[RolloutGroup]:
        """Return the groups with sampled and scored responses."""
        if not groups:
            return []
        tokens, logprobs = self._sample(groups)
        for place, group in enumerate(groups):
            for number, state in enumerate(group.states):
                self._fill(state, tokens[place, number], logprobs[place, number], weights)
        return [RolloutGroup(group.gid, group.task, group.states) for group in groups]

    @torch.no_grad()
    def _sample(
        self, groups: Sequence[RolloutGroup]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return tokens and logprobs, [groups, k, steps], until every response has ended.

        Each group has its own random numbers.
        """
        draws = [
            torch.Generator().manual_seed(hash_of(self._seed, split_group_id(g.gid)[1]))
            for g in groups
        ]
        prompts = np.stack([group.prompt_ids.astype(np.int64) for group in groups])
        ids, shape = torch.from_numpy(prompts).repeat_interleave(self._k, 0), (len(groups), self._k)
        columns: list[tuple[torch.Tensor, torch.Tensor]] = []
        cache = None
        ended = torch.zeros(shape, dtype=torch.bool)
        while len(columns) < self._problems.max_tokens and not ended.all():
            out = self._model(ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logprobs = torch.log_softmax(out.logits[:, -1].float(), -1).view(*shape, -1)
            drawn = [
                torch.multinomial(p.exp(), 1, generator=draw)
                for p, draw in zip(logprobs, draws, strict=True)
            ]
            tokens = torch.stack(drawn)
            columns.append((tokens[..., 0], logprobs.gather(2, tokens)[..., 0]))
            ended |= tokens[..., 0] == self._end
            ids = tokens.view(-1, 1)
        ids_of, logprobs_of = (
            torch.stack(column, 2).numpy() for column in zip(*columns, strict=True)
        )
        return ids_of, logprobs_of

    def _fill(
        self,
        state: RolloutState,
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        weights: PolicyVersion,
    ) -> None:
        """One response, up to its end, and its score: 1 where it is the answer, else 0."""
        ended = np.flatnonzero(tokens == self._end)
        length = int(ended[0]) + 1 if len(ended) else len(tokens)
        span = VersionSpan(0, length, weights.version, weights.lineage)
        state.append(tokens[:length].astype("<i4"), logprobs[:length].astype("<f4"), [span])
        said = self._tokenizer.decode(tokens[: length - bool(len(ended))]).strip()
        state.status, state.reward = Status.COMPLETED, {"score": float(said == state.ground_truth)}
        state.finish_reason = "stop" if len(ended) else "length"


def hash_of(seed: int, draw: int) -> int:
    """Return the seed of a draw, which is the same in every process."""
    return (seed * 1_000_003 + draw) % 2**31
