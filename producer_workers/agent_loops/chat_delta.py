"""Compute the tokens that a chat template puts between two turns of the model.

What the model sampled is never tokenized again: the template formats a fixed turn, and only what
follows its end token, a special one, is taken.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ConfigError
from producer_workers.agent_loops.tokenizer import Tokenizer, encode_chat

_USER = {"role": "user", "content": "a"}
# A turn of a reasoning model; templates drop the thought or keep it.
_THOUGHT = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nb"}

# Fields that belong to the conversation in any template.
_ALWAYS_READ = ("role", "content", "name", "tool_calls", "tool_call_id")

Messages = Sequence[dict[str, Any]]


class ChatDelta:
    """The template of one tokenizer; `eos_ids` end a turn.

    With `keep_turns`, the model reads its earlier turns as it wrote them, thoughts included, though
    its template may drop these.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_ids: Collection[int], *, keep_turns: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._names = _names(tokenizer)
        self._checked: set[tuple[bool, tuple[str, ...]]] = set()
        self._orders: dict[tuple[str, ...], bool] = {}
        self._keep_turns = keep_turns
        self._turn_with_thought()

    def tokens(
        self, messages: Messages, *, end_turn: bool = False, has_thought: bool = True
    ) -> NDArray[np.int32]:
        """Return int32[n] from after the token that ended the model's turn up to its next turn.

        `end_turn`: a stop string ended the turn, so its end token comes first. `has_thought`: the
        turn may contain a thought. Raises ConfigError if the template cannot express these
        messages.
        """
        self._check(messages, has_thought and not self._keep_turns)
        return self._tail(messages, end_turn)

    @cached_property
    def largest_token(self) -> int | None:
        vocabulary: dict[str, int] = getattr(self._tokenizer, "get_vocab", dict)()
        return max(vocabulary.values(), default=None)

    def readable(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with what the template can read.

        Fields that clients add are left out. A thought in a field of its own becomes a part of the
        content, and a developer's message one of the system, where the template does not know them.
        """
        names = self._names
        if names is None:
            return message
        kept = {key: message[key] for key in message if key in names}
        thought = message.get("reasoning_content") or message.get("reasoning")
        is_read = not kept.keys().isdisjoint(("reasoning_content", "reasoning"))
        if thought and not is_read and message["role"] == "assistant":
            kept["content"] = f"<think>\n{thought}\n</think>\n\n{message.get('content', '')}"
        if message["role"] == "developer" and "developer" not in names:
            kept["role"] = "system"
        return kept

    def in_order(self, messages: Messages) -> list[dict[str, Any]]:
        """Return readable messages in an order that the template accepts.

        Where it refuses theirs, a system message behind others becomes a user's, and neighbours of
        one role are joined.
        """
        if self._names is None:
            return list(messages)
        made: list[dict[str, Any]] = []
        last = "system"
        for message in messages:
            role = message["role"]
            if role == "system" != last and not self._reads("user", "assistant", "system", "user"):
                role = "user"
                message = {**message, "role": role}
            if role == last in ("system", "user") and made and not self._reads(role, role, "user"):
                content = f"{made[-1]['content']}\n\n{message['content']}"
                made[-1] = {**made[-1], "content": content}
            else:
                made.append(message)
            last = role
        return made

    def _reads(self, *roles: str) -> bool:
        """Return whether the template accepts this order, and writes the last message but one."""
        if roles not in self._orders:
            with_words = [{"role": role, "content": "a"} for role in roles]
            written = []
            for word in "bc":
                with_words[-2]["content"] = word
                with suppress(ConfigError):
                    written.append(self._encode(with_words, generation=True))
            self._orders[roles] = len(written) == 2 and written[0] != written[1]
        return self._orders[roles]

    def _behind_a_turn(self, messages: Messages) -> tuple[list[int], int]:
        """Return a conversation with `messages` after a turn of the model, and that turn's end."""
        calls = [message for message in messages if message["role"] == "tool"]
        if calls:  # some templates drop a result without a call
            try:
                return self._between([_turn_with_calls(calls, word) for word in "bc"], messages)
            except ConfigError:  # and some accept one call only
                pass
        return self._between([{"role": "assistant", "content": word} for word in "bc"], messages)

    def _between(self, turns: Messages, messages: Messages) -> tuple[list[int], int]:
        """Do as `_behind_a_turn` with two turns, which differ where the turn is."""
        whole, other = (self._encode([_USER, turn, *messages], generation=True) for turn in turns)
        differs = _first_difference(whole, other)
        if differs is None:
            raise ConfigError("the chat template drops the model's turn")
        return whole, self._first_end(whole, differs)

    def _tail(self, messages: Messages, end_turn: bool = False) -> NDArray[np.int32]:
        whole, end = self._behind_a_turn(messages)
        return np.array(whole[end - end_turn :], "<i4")

    def _check(self, messages: Messages, has_thought: bool) -> None:
        """Raise ConfigError if the template drops such messages or rewrites earlier turns."""
        roles = tuple(str(message["role"]) for message in messages)
        if (has_thought, roles) in self._checked:
            return
        one, other = (
            self._tail([message | {"content": word} for message in messages]) for word in "bc"
        )
        if np.array_equal(one, other):
            raise ConfigError(
                f"the chat template drops messages of {', '.join(roles)} behind the model's turn",
                hint="use another role for them, or another template",
            )
        if has_thought:
            self._refuse_what_rewrites(messages)
        self._checked.add((has_thought, roles))

    def _refuse_what_rewrites(self, messages: Messages) -> None:
        turn, end = self._turn_with_thought()
        try:
            whole = self._encode([_USER, _THOUGHT, *messages], generation=True)
        except ConfigError:  # this template wants a call before a result
            return
        if whole[: end - 1] != turn[: end - 1]:
            raise ConfigError(
                "the chat template rewrites an earlier turn once more messages follow "
                "(it may drop the thought)",
                hint="set agent_loop_options keep_turns = true: "
                "the model then reads its turns as it wrote them",
            )

    def _turn_with_thought(self) -> tuple[list[int], int]:
        """Return the tokens of a conversation that ends with a thought, and that turn's end."""
        whole = self._encode([_USER, _THOUGHT], generation=False)
        other = self._encode([_USER], generation=False)
        differs = _first_difference(whole, other)
        return whole, self._first_end(whole, len(other) if differs is None else differs)

    def _first_end(self, ids: Sequence[int], start: int) -> int:
        """Return the position after the first token from `start` on that ends a turn."""
        for position in range(start, len(ids)):
            if ids[position] in self._eos_ids:
                return position + 1
        raise ConfigError(
            "the chat template ends the model's turn with none of its end-of-text tokens",
            hint="see eos_token_id in the model's generation_config.json",
        )

    def _encode(self, messages: Messages, *, generation: bool) -> list[int]:
        try:
            return encode_chat(self._tokenizer, messages, opens_turn=generation)
        except ConfigError:
            raise
        except Exception as error:  # a template may raise anything
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
            raise ConfigError(
                f"the chat template does not accept the roles {roles}: {error}"
            ) from error


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    pairs = zip(one, other, strict=False)
    return next((position for position, (a, b) in enumerate(pairs) if a != b), None)


def _turn_with_calls(results: Messages, word: str) -> dict[str, Any]:
    calls = [
        {
            "id": str(result.get("tool_call_id", number)),
            "type": "function",
            "function": {"name": str(result.get("name", "f")), "arguments": {"a": word}},
        }
        for number, result in enumerate(results)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _names(tokenizer: Any) -> frozenset[str] | None:
    """Return the names that the chat templates use; None if no template is known."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    return frozenset([*_ALWAYS_READ, *re.findall(r"\w+", str(template))])
