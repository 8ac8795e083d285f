"""Load a Hugging Face tokenizer, use it in one thread, and write the chats of a task with it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

from buffer.errors import ConfigError, ModelError
from producer_workers.engines.model_folder import read_config

P = ParamSpec("P")
T = TypeVar("T")

# Two for the process, so that short texts never wait for a long one, which takes a second per MB.
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
_LONG_TEXTS = ThreadPoolExecutor(1, thread_name_prefix="long-texts")
LONG_TEXT = 2**17  # bytes

BYTES_PER_TOKEN = 16
"""A text of more bytes for each token that fits is refused before it is encoded: English has 4 to 5
bytes per token, indented code up to 8.
"""


async def in_tokenizer_thread(work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Return the result of `work`, which uses a tokenizer, without blocking the event loop."""
    return await in_thread_of_texts(0, work, *args, **options)


async def in_thread_of_texts(
    size: int, work: Callable[P, T], *args: P.args, **options: P.kwargs
) -> T:
    """Do the same for `work` on texts of `size` bytes."""
    thread = _LONG_TEXTS if size > LONG_TEXT else _THREAD
    return await asyncio.get_running_loop().run_in_executor(thread, partial(work, *args, **options))


# Model types for which AutoTokenizer follows the class that the folder names; for others, such as
# qwen2, it may choose another class. "": the folder has no model.
_TRUSTED_TYPES = ("", "llama", "qwen3", "qwen3_moe")

ZERO_WIDTH_SPACE = "\u200b"

# Roles of which a template may make a control token, as in '<|' + message['role'] + '|>'.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ControlTokens:
    """The special tokens of a tokenizer, broken up in texts: only the template writes any.

    A text may come from a data set, a tool, an environment, an agent, or a page that one of these
    read. Without this, `<|im_end|>` in it would end a turn, and `<|im_start|>assistant` begin the
    model's.
    """

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


SYSTEM_ROLES = ("system", "developer")


class Tokenizer(Protocol):
    """The methods that samplers and agent loops need; any Hugging Face tokenizer has them."""

    def apply_chat_template(self, conversation: Any, /, **options: Any) -> Any: ...

    def decode(self, token_ids: Any, /, **options: Any) -> Any: ...


class TaskTokenizer:
    """A tokenizer with a task's template arguments and system prompt."""

    def __init__(
        self, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any], system_prompt: str | None
    ) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs)
        self._system_prompt = ControlTokens.of(tokenizer).broken_up(system_prompt)

    def apply_chat_template(self, conversation: Any, /, **options: Any) -> Any:
        messages = with_system_prompt(conversation, self._system_prompt)
        return self._tokenizer.apply_chat_template(messages, **{**self._template_kwargs, **options})

    def decode(self, token_ids: Any, /, **options: Any) -> Any:
        return self._tokenizer.decode(token_ids, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def with_system_prompt(
    messages: Sequence[dict[str, Any]], system_prompt: str | None
) -> list[dict[str, Any]]:
    """Return the messages after the system prompt, unless they begin with their own."""
    has_own = bool(messages) and messages[0].get("role") in SYSTEM_ROLES
    if system_prompt is None or has_own:
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *messages]


def load_tokenizer(model: str) -> Tokenizer:
    """Load the tokenizer of a model folder or hub name. Raises ModelError."""
    try:
        tokenizer = _tokenizer_class(Path(model)).from_pretrained(model)
    except (OSError, ValueError) as error:
        hint = "give a folder with tokenizer.json, or a model name of the hub"
        raise ModelError(f"no tokenizer in {model!r}: {error}", hint=hint) from error
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        # some files set these; the first use would unset them, and no two threads may do that
        backend.no_truncation()
        backend.no_padding()
    return cast(Tokenizer, tokenizer)


def _tokenizer_class(folder: Path) -> Any:
    """Return AutoTokenizer's choice without its import of torch, which takes seconds."""
    fields = read_config(folder, "tokenizer_config.json")
    is_general = fields.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in fields
    if is_general and str(read_config(folder).get("model_type", "")) in _TRUSTED_TYPES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    opens_turn: bool = True,
) -> list[int]:
    """Return the token ids of a chat, with its tools, up to the start of the model's turn.

    Every chat of a run is encoded here, so that no text of it has control tokens. Raises
    ConfigError for a chat that ends with the model's own message, and what the template raises.
    """
    if opens_turn and messages and messages[-1].get("role") == "assistant":
        raise ConfigError(
            "the conversation ends with a message of the assistant, which would be closed before "
            "the model's own turn",
            hint="end it with a message of the user or of a tool",
        )
    safe = ControlTokens.of(tokenizer)
    # return_dict is given because its default differs between transformers 4 and 5.
    ids = tokenizer.apply_chat_template(
        safe.in_messages(messages),
        tools=safe.broken_up(list(tools)) if tools else None,
        tokenize=True,
        add_generation_prompt=opens_turn,
        return_dict=False,
    )
    return list(map(int, ids))
