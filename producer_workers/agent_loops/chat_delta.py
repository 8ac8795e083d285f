"""The tokens that a chat template puts between two turns of the model: tool results, or what an
environment says.

What the model sampled is never tokenized again (training would then be on tokens that nobody
sampled). So only what comes after its turn is asked of the template: the messages behind a turn of
a fixed text, from the token on that ends that turn. It is a special token, across which no
tokenizer merges.

What others say cannot end a turn or begin one: special tokens that are written out in a message are
broken up.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ConfigError
from producer_workers.agent_loops.tokenizer import Tokenizer

_USER = {"role": "user", "content": "a"}
_THOUGHT = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nb"}
"""A turn as models that think write it; templates drop the thought, or keep it."""

ZERO_WIDTH_SPACE = "\u200b"

Messages = Sequence[dict[str, Any]]


class ChatDelta:
    """For one tokenizer. `eos_ids`: what ends a turn. `keep_turns`: the model goes on reading its
    earlier turns as it said them, although its template would write them anew.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_ids: Collection[int], *, keep_turns: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._special = _special_tokens(tokenizer)
        self._checked: set[tuple[bool, tuple[str, ...]]] = set()
        self._keep_turns = keep_turns
        self._end_of_turn([_USER, _THOUGHT], generation=False)

    def tokens(
        self, messages: Messages, *, end_turn: bool = False, has_thought: bool = True
    ) -> NDArray[np.int32]:
        """int32[n]: from behind the token that ended the model's turn up to where its next turn
        begins.

        `end_turn`: that token is missing, since a stop string ended the turn; it comes first then.
        `has_thought`: the model may have written down what it thought. Raises ConfigError for a
        template that cannot say this.
        """
        said = self.harmless(messages)
        self._check(said, has_thought and not self._keep_turns)
        return self._tail(said, end_turn)

    def harmless(self, messages: Messages) -> list[dict[str, Any]]:
        """The messages, with special tokens in their texts broken up: a zero-width space behind the
        first letter.
        """
        return [
            message | {"content": self._broken_up(message.get("content"))} for message in messages
        ]

    def _broken_up(self, content: Any) -> Any:
        if self._special is None or not isinstance(content, str):
            return content
        return self._special.sub(
            lambda found: found[0][0] + ZERO_WIDTH_SPACE + found[0][1:], content
        )

    def _behind_a_turn(self, messages: Messages) -> tuple[list[int], int]:
        """(a conversation with `messages` behind a turn of the model, the place behind that turn)"""
        calls = [message for message in messages if message["role"] == "tool"]
        if calls:  # some templates leave a result out unless somebody has asked for it
            try:
                return self._between([_asking(calls, word) for word in "bc"], messages)
            except ConfigError:  # and some take one call only
                pass
        return self._between([{"role": "assistant", "content": word} for word in "bc"], messages)

    def _between(self, turns: Messages, messages: Messages) -> tuple[list[int], int]:
        """The same for two turns: where what the template makes of them differs, the turn is."""
        whole, other = (self._encode([_USER, turn, *messages], generation=True) for turn in turns)
        place = next(
            (n for n, pair in enumerate(zip(whole, other, strict=False)) if pair[0] != pair[1]),
            None,
        )
        if place is None:
            raise ConfigError("the chat template leaves out the model's turn")
        return whole, self._first_end(whole, place)

    def _tail(self, messages: Messages, end_turn: bool = False) -> NDArray[np.int32]:
        whole, end = self._behind_a_turn(messages)
        return np.array(whole[end - end_turn :], "<i4")

    def _check(self, messages: Messages, has_thought: bool) -> None:
        """Raises ConfigError where the template loses what such messages say, or rewrites the turn
        before them.
        """
        roles = tuple(str(message["role"]) for message in messages)
        if (has_thought, roles) in self._checked:
            return
        one, other = (
            self._tail([message | {"content": word} for message in messages]) for word in "bc"
        )
        if np.array_equal(one, other):
            raise ConfigError(
                f"the chat template leaves out what {', '.join(roles)} say behind the model's turn",
                hint="choose another role for it, or another template",
            )
        if has_thought:
            self._refuse_what_rewrites(messages)
        self._checked.add((has_thought, roles))

    def _refuse_what_rewrites(self, messages: Messages) -> None:
        turn, end = self._end_of_turn([_USER, _THOUGHT], generation=False)
        try:
            whole = self._encode([_USER, _THOUGHT, *messages], generation=True)
        except ConfigError:  # a result that nobody asked for here
            return
        if whole[: end - 1] != turn[: end - 1]:
            raise ConfigError(
                "the chat template writes an earlier turn differently once more messages follow (drops what was "
                "thought, say)",
                hint="agent_loop_options keep_turns = true: the model goes on reading its turns as it said them",
            )

    def _end_of_turn(self, messages: Messages, *, generation: bool) -> tuple[list[int], int]:
        """(the tokens of a conversation that the model's turn ends, the place behind that turn)"""
        whole = self._encode(messages, generation=generation)
        other = self._encode(messages[:-1], generation=generation)
        place = next(
            (n for n, pair in enumerate(zip(whole, other, strict=False)) if pair[0] != pair[1]),
            len(other),
        )
        return whole, self._first_end(whole, place)

    def _first_end(self, ids: Sequence[int], start: int) -> int:
        """The place behind the first token from `start` on that ends a turn."""
        for place in range(start, len(ids)):
            if ids[place] in self._eos_ids:
                return place + 1
        raise ConfigError(
            "the chat template ends the model's turn with none of its end-of-text tokens",
            hint="see eos_token_id in the model's generation_config.json",
        )

    def _encode(self, messages: Messages, *, generation: bool) -> list[int]:
        try:
            ids = self._tokenizer.apply_chat_template(
                list(messages), tokenize=True, add_generation_prompt=generation, return_dict=False
            )
        except (
            Exception
        ) as error:  # templates are programs of the model's authors: they raise what they like
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
            raise ConfigError(
                f"the chat template does not take the roles {roles}: {error}"
            ) from error
        return [int(token) for token in ids]


def _asking(results: Messages, word: str) -> dict[str, Any]:
    """A turn of the model that asked for these results of tools."""
    calls = [
        {
            "id": str(result.get("tool_call_id", place)),
            "type": "function",
            "function": {"name": str(result.get("name", "f")), "arguments": {"a": word}},
        }
        for place, result in enumerate(results)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _special_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """What stands for a special token of a Hugging Face tokenizer in a text; None where it has
    none.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    words = {str(token) for token in added if token.special} | set(
        getattr(tokenizer, "all_special_tokens", ())
    )
    return (
        re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))
        if words
        else None
    )
