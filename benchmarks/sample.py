"""Make the group of all figures: 8 rollouts of 512 prompt and 2,048 response tokens, 165,888 bytes.

That is the size of its token columns (ids, logprobs and mask) with the prompt written out for each
rollout. This format stores the prompt once; the text of the answers makes up the difference.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from buffer.wire.sampling import SampleParams

GROUP_BYTES = 165_888
VOCABULARY = 151_936


class Shape(NamedTuple):
    """Rollouts of a group, and tokens of each."""

    samples: int
    prompt: int
    response: int


FULL = Shape(8, 512, 2048)
SMALL = Shape(1, 8, 1)
"""For what depends on the number of groups, not on their bytes."""


def group(gid: str, shape: Shape = FULL) -> RolloutGroup:
    """Return a completed group with random tokens; in full shape it encodes to `GROUP_BYTES`."""
    made = _group(gid, shape, [""] * shape.samples)
    if shape != FULL:
        return made
    # a text needs a few bytes for its name and length, too; the last one takes what is left
    share = (GROUP_BYTES - len(group_bytes.encode(made))) // shape.samples - 12
    texts = ["x" * share] * shape.samples
    texts[-1] += "x" * (GROUP_BYTES - len(group_bytes.encode(_group(gid, shape, texts))))
    return _group(gid, shape, texts)


def written(gid: str, shape: Shape, text: str) -> RolloutGroup:
    """Return a completed group whose response tokens are each `text`."""
    return _group(gid, shape, [text * shape.response] * shape.samples)


def prompt(gid: str, shape: Shape = FULL) -> bytes:
    """Return the INIT payload of a group."""
    ids = _tokens(_generator(gid), shape.prompt)
    states = [RolloutState(index=index, prompt_ids=ids) for index in range(shape.samples)]
    return group_bytes.encode(RolloutGroup(gid, gid.rpartition("-")[0], states))


def _group(gid: str, shape: Shape, texts: list[str]) -> RolloutGroup:
    rng = _generator(gid)
    tokens = shape.response
    ids = _tokens(rng, shape.prompt)
    message = {"role": "user", "content": "What is the answer to everything?"}
    states = [
        RolloutState(
            index=index,
            messages=[message],
            prompt_ids=ids,
            response=text,
            response_ids=_tokens(rng, tokens),
            logprobs=-rng.exponential(1.0, tokens).astype("<f4"),
            response_mask=(rng.random(tokens) < 0.9).astype("u1"),
            spans=[VersionSpan(0, tokens, 0, "l0")],
            reward={"score": float(index % 2)},
            status=Status.COMPLETED,
            finish_reason="stop",
            sample_params=SampleParams(seed=index),
        )
        for index, text in enumerate(texts)
    ]
    return RolloutGroup(gid, gid.rpartition("-")[0], states)


def _generator(gid: str) -> np.random.Generator:
    return np.random.default_rng(int(gid.rpartition("-")[2]))


def _tokens(rng: np.random.Generator, count: int) -> NDArray[np.int32]:
    return rng.integers(0, VOCABULARY, count, "<i4")
