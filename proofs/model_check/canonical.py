"""One name for all states that behave alike.

Tokens and ids of stream entries are named by their first appearance, times by their distance from
now.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from proofs.model_check.server_image import Entry, Image

LEASE_MS = 10_000
_NAME = re.compile(r"q[0-9a-f]{31}|\b\d{13}-\d+\b")
_PAST = re.compile(r"(?:taken|archived)_ms=\d+")
_IGNORED = {b"submitted_ms", b"weights_ms", b"created_ms", b"digest"}
"""Fields that nothing is decided by; `digest` is checked to be that of the other fields."""


class Keys:
    """Makes the keys of states; keeps the text of each entry of the server at each time."""

    def __init__(self) -> None:
        self._texts: dict[tuple[int, int], str] = {}

    def key_of(self, image: Image, now_ms: int, rest: Any) -> bytes:
        """Return the same digest for states that behave alike."""
        texts = []
        for number, (key, entry) in zip(image.numbers, image.items(), strict=True):
            text = self._texts.get((number, now_ms))
            if text is None:
                text = self._texts[number, now_ms] = _PAST.sub("", _text(key, entry, now_ms))
            texts.append(text)
        texts.append(_PAST.sub("", repr(rest)))
        names: dict[str, str] = {}
        renamed = _NAME.sub(
            lambda found: names.setdefault(found[0], f"q{len(names)}"), "".join(texts)
        )
        return hashlib.blake2b(renamed.encode(), digest_size=12).digest()


def _text(key: bytes, entry: Entry, now_ms: int) -> str:
    kind, plain, expires = entry
    match kind:
        case "hash":
            value: Any = sorted(
                (name, _field(name, text, now_ms))
                for name, text in plain.items()
                if name not in _IGNORED
            )
        case "zset":
            value = _scores(key, plain, now_ms)
        case "set":
            value = sorted(plain)
        case "stream":
            value = plain.entries
        case _:
            value = len(plain) if b":payload:" in key else plain
    text = repr((key, value, expires is not None))
    # ids of entries as records have them
    return re.sub(r"\((\d{13}), (\d+)\)", r"\1-\2", text) if kind == "stream" else text


def _field(name: bytes, value: bytes, now_ms: int) -> Any:
    is_time = name.endswith(b"_ms") and value.isdigit() and int(value) > LEASE_MS * 1000
    return _distance(int(value), now_ms) if is_time else value


def _scores(key: bytes, plain: dict[bytes, float], now_ms: int) -> list[Any]:
    name = key.rpartition(b":")[2]
    if name in (b"leases", b"workers"):
        return sorted((member, _distance(int(score), now_ms)) for member, score in plain.items())
    if name == b"dead":
        return sorted(plain)
    return sorted((score, member) for member, score in plain.items())


def _distance(then_ms: int, now_ms: int) -> int:
    """Return a time from now, up to four leases: beyond that, nothing differs."""
    return max(-4 * LEASE_MS, min(4 * LEASE_MS, then_ms - now_ms))
