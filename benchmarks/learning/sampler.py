"""Real sampling from a small model: one group at a time, the same tokens for the same weights and seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.learning.sums import MAX_TOKENS, problem
from buffer import PolicyVersion, RolloutGroup, RolloutState, Status, VersionSpan, split_group_id
from consumer.model_folder import load_model, load_tokenizer


class Sampler:
    """Holds one version of the weights, and answers the problem of a draw `k` times."""

    def __init__(self, model_dir: Path, k: int, seed: int) -> None:
        self._tokenizer = load_tokenizer(model_dir)
        self._model = load_model(model_dir).eval()
        self._k, self._seed = k, seed

    def load(self, folder: Path) -> None:
        self._model = load_model(folder).eval()

    def prompt(self, gid: str) -> RolloutGroup:
        """The INIT group of a draw."""
        task, draw = split_group_id(gid)
        asked = problem(draw, self._seed)
        ids = self._tokenizer.apply_chat_template(asked.messages, add_generation_prompt=True, return_dict=True)
        prompt = np.array(ids["input_ids"], "<i4").reshape(-1)
        states = [
            RolloutState(index=i, prompt_ids=prompt, messages=asked.messages, ground_truth=asked.answer)
            for i in range(self._k)
        ]
        return RolloutGroup(gid, task, states)

    @torch.no_grad()
    def answer(self, group: RolloutGroup, weights: PolicyVersion) -> RolloutGroup:
        """The group with sampled responses and scores: 1 where the answer is the sum, else 0."""
        generator = torch.Generator().manual_seed(hash_of(self._seed, split_group_id(group.gid)[1]))
        ids = torch.from_numpy(group.prompt_ids.astype(np.int64)).repeat(self._k, 1)
        end, cache, columns = int(self._tokenizer.eos_token_id), None, []
        for _ in range(MAX_TOKENS):
            out = self._model(ids, past_key_values=cache, use_cache=True)
            cache, logprobs = out.past_key_values, torch.log_softmax(out.logits[:, -1].float(), -1)
            ids = torch.multinomial(logprobs.exp(), 1, generator=generator)
            columns.append((ids[:, 0].numpy(), logprobs.gather(1, ids)[:, 0].numpy()))
        tokens, chances = (np.stack(column, 1) for column in zip(*columns, strict=True))
        for state, row, chance in zip(group.states, tokens, chances, strict=True):
            ended = np.flatnonzero(row == end)
            length = int(ended[0]) + 1 if len(ended) else MAX_TOKENS
            span = VersionSpan(0, length, weights.version, weights.lineage)
            state.append(row[:length].astype("<i4"), chance[:length].astype("<f4"), [span])
            said = self._tokenizer.decode(row[: length - bool(len(ended))]).strip()
            state.status, state.reward = Status.COMPLETED, {"score": float(said == state.ground_truth)}
            state.finish_reason = "stop" if len(ended) else "length"
        return RolloutGroup(group.gid, group.task, group.states)


def hash_of(seed: int, draw: int) -> int:
    """A seed of its own for every draw, the same in every process."""
    return (seed * 1_000_003 + draw) % 2**31
