"""Break up control tokens in the texts that a chat template is given: only the template writes any.

A text may come from a data set, a tool, an environment, an agent, or a page that one of these read.
Without this, `<|im_end|>` in it would end a turn, and `<|im_start|>assistant` begin the model's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

ZERO_WIDTH_SPACE = "\u200b"

# Roles of which a template may make a control token, as in '<|' + message['role'] + '|>'.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ControlTokens:
    """The tokens of a tokenizer that it calls special, as they are written out."""

    _known: ClassVar[WeakKeyDictionary[Any, ControlTokens]] = WeakKeyDictionary()

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        words = {str(token) for token in added if token.special}
        words |= set(getattr(tokenizer, "all_special_tokens", ()))
        # a token of one sign cannot be broken up: it is an ordinary sign with a second use
        self._words = [word for word in words if len(word) > 1 and ZERO_WIDTH_SPACE not in word]
        longest_first = sorted(self._words, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._reach = max(map(len, self._words), default=1) - 1

    @classmethod
    def of(cls, tokenizer: Any) -> ControlTokens:
        """Return those of a tokenizer, which are read once."""
        if tokenizer not in cls._known:
            cls._known[tokenizer] = cls(tokenizer)
        return cls._known[tokenizer]

    def in_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with each control token broken up by a zero-width space."""
        safe: list[dict[str, Any]] = self.broken_up(list(messages))
        return [
            {**message, "role": self._role(role)}
            if isinstance(role := message.get("role"), str)
            else message
            for message in safe
        ]

    def broken_up(self, value: Any) -> Any:
        """Do the same in all texts of a value, keys included."""
        if not self._words:
            return value
        match value:
            case str():
                # repeated, because the rest of one token may spell another
                while self._pattern.search(value):
                    value = self._pattern.sub(
                        lambda found: found[0][0] + ZERO_WIDTH_SPACE + found[0][1:], value
                    )
            case dict():
                return {self.broken_up(key): self.broken_up(each) for key, each in value.items()}
            case list() | tuple():
                return self._apart([self.broken_up(each) for each in value])
        return value

    def _role(self, role: str) -> str:
        """Return a role from which a template cannot make a control token."""
        is_part = role not in _ROLES and any(role in word for word in self._words)
        return role + ZERO_WIDTH_SPACE if role and is_part else role

    def _apart(self, parts: list[Any]) -> list[Any]:
        """Return the parts of a content so that their texts, joined, spell no control token."""
        before = ""
        for position, part in enumerate(parts):
            text = part.get("text") if isinstance(part, dict) else part
            if not isinstance(text, str):
                continue
            if self._pattern.search(before + text[: self._reach]):
                text = ZERO_WIDTH_SPACE + text
                parts[position] = {**part, "text": text} if isinstance(part, dict) else text
            before = (before + text)[-self._reach :]
        return parts
