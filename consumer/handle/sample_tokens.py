"""Numbers by token beside a sample: ids, log-probabilities of engine and trainer, entropy.

Each is one text, the base64 of an array, so a reader of texts need not parse them. Values are in
nats, rounded to thousandths; NaN where the trainer computed none, as it trained no gradient there.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.wire.group import RolloutGroup

FIELD = "by_token"
"""In the JSON of a sample's rollout: a text for each name of _TYPES."""

_TYPES = {"ids": "<i4", "mask": "<u1", "engine": "<f2", "trainer": "<f2", "entropy": "<f2"}
# as `group_json` names them
_NAMES = {
    "ids": "response_ids", "mask": "response_mask", "engine": "logprobs",
    "trainer": "trainer_logprobs", "entropy": "entropy",
}  # fmt: skip

Packed = dict[str, str]


def pack_group(group: RolloutGroup, most: int) -> list[Packed]:
    """Return ids, mask and the engine's numbers of the first `most` tokens of each rollout."""
    columns: Mapping[str, NDArray[Any]] = {
        "ids": group.response_ids,
        "mask": group.mask,
        "engine": group.logprobs,
    }
    return pack(columns, group.lengths, most)


def pack(
    columns: Mapping[str, NDArray[Any]], lengths: NDArray[np.int32], most: int
) -> list[Packed]:
    """Return the first `most` tokens of each rollout, of columns [R] of their group."""
    starts = (np.cumsum(lengths) - lengths).tolist()
    parts = [slice(a, a + min(n, most)) for a, n in zip(starts, lengths.tolist(), strict=True)]
    return [{name: _text(own[part], name) for name, own in columns.items()} for part in parts]


def _text(values: NDArray[Any], name: str) -> str:
    kind = _TYPES[name]
    rounded = np.round(values.astype(np.float64), 3) if kind == "<f2" else values
    return b64encode(rounded.astype(kind).tobytes()).decode()


def unpack(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with its numbers as lists, under their names in the JSON of a group."""
    return sample | {"members": [_unpacked(member) for member in sample["members"]]}


def _unpacked(member: dict[str, Any]) -> dict[str, Any]:
    packed: Mapping[str, str] = member.get(FIELD) or {}
    lists: dict[str, Sequence[float]] = {
        _NAMES[name]: np.frombuffer(b64decode(text), _TYPES[name]).tolist()
        for name, text in packed.items()
        if name in _NAMES
    }
    return {name: value for name, value in member.items() if name != FIELD} | lists


def without_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    members = [{n: v for n, v in member.items() if n != FIELD} for member in sample["members"]]
    return sample | {"members": members}
