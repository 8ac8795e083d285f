"""The prompts of a run: rows of a data set, and a tokenizer that writes a row as random ids."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np

from buffer.wire.rollout import RolloutState
from producer_workers.agent_loops.environment import Answer, Turn
from producer_workers.datasets.dataset import Problem
from proofs.truth.engine import EOS, FIRST_ID, LAST_ID
from proofs.truth.witness import digest, score_of

ROWS = 10_007
TURN_IDS = 7
"""Ids of a message between two turns of the model."""
_BEGIN = 2


class Words:
    """A tokenizer: every text is a run of random ids, that of a row `prompt` of them."""

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt

    def decode(self, ids: Any, /, **_: Any) -> str:
        return f"{len(ids)} tokens"

    def apply_chat_template(self, messages: Any, /, **options: Any) -> list[int]:
        ids = [token for message in messages for token in self._message(str(message["content"]))]
        return [*ids, _BEGIN] if options.get("add_generation_prompt") else ids

    def _message(self, text: str) -> list[int]:
        count = self._prompt if text.startswith("row ") else TURN_IDS
        dice = np.random.default_rng(crc32(text.encode()))
        return [*dice.integers(FIRST_ID, LAST_ID, count).tolist(), EOS]

    def prompt_of(self, gid: str) -> str:
        """Digest of the prompt of a draw, as `Rows` and `Sampler` make it."""
        draw = int(gid.rpartition("-")[2])
        problem = Rows().row(draw % ROWS, draw // ROWS)
        ids = self.apply_chat_template(problem.messages, add_generation_prompt=True)
        return digest(np.array(ids, "<i4"))


class Rows:
    """A data set, read in order."""

    def __len__(self) -> int:
        return ROWS

    def row(self, row: int, epoch: int = 0) -> Problem:
        return Problem(messages=[{"role": "user", "content": f"row {row} of {epoch}"}])


class Asker:
    """An environment that answers the model's turns but the last one."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def answer(self, state: RolloutState, turn: Turn) -> Answer:
        if turn.number + 1 >= self._turns:
            return Answer()
        text = f"{state.messages[0]['content']}, member {state.index}, turn {turn.number}"
        return Answer([{"role": "user", "content": f"answer to {text}"}])


def score(*, response: str, ground_truth: object, state: RolloutState) -> float:
    """The judge."""
    return score_of(state.response_ids)
