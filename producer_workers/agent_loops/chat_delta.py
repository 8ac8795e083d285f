"""The tokens that a chat template puts between two turns of the model: tool results, or what an environment says.

What the model sampled is never tokenized again (training would then be on tokens that nobody sampled). So only what
comes after its turn is asked of the template: once with a turn of a fixed text, once with the messages behind it, and
the second beyond the end of that turn. The end is a special token, across which no tokenizer merges.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ConfigError
from producer_workers.tokenizer import Tokenizer

_CHAT = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


class ChatDelta:
    """For one tokenizer. `eos_ids`: what ends a turn."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int]) -> None:
        self._tokenizer, self._eos_ids = tokenizer, frozenset(eos_ids)
        self._turn = self._encode([*_CHAT], generation=False)
        self._end = _last_of(self._turn, self._eos_ids)

    def tokens(self, messages: Sequence[dict[str, Any]], *, end_turn: bool = False) -> NDArray[np.int32]:
        """int32[n]: from behind the token that ended the model's turn up to where its next turn begins.

        `end_turn`: that token is missing, since a stop string ended the turn; it comes first then.
        """
        whole = self._encode([*_CHAT, *messages], generation=True)
        if whole[: self._end] != self._turn[: self._end]:
            raise ConfigError(
                "the chat template writes an earlier turn differently once more messages follow",
                hint="such a template (one that drops earlier reasoning, say) cannot be trained over several turns",
            )
        return np.array(whole[self._end - end_turn :], "<i4")

    def _encode(self, messages: list[dict[str, Any]], *, generation: bool) -> list[int]:
        try:
            ids = self._tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=generation, return_dict=False
            )
        except Exception as error:  # templates are programs of the model's authors: they raise what they like
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
            raise ConfigError(f"the chat template does not take the roles {roles}: {error}") from error
        return [int(token) for token in ids]


def _last_of(ids: list[int], ends: Collection[int]) -> int:
    """The place behind the last token that ends a turn."""
    for place in range(len(ids) - 1, -1, -1):
        if ids[place] in ends:
            return place + 1
    raise ConfigError(
        "the chat template ends the model's turn with none of its end-of-text tokens",
        hint="see eos_token_id in the model's generation_config.json",
    )
