"""Records the content of rollouts: where an engine makes it, and where a trainer uses it.

Both sides describe tokens by digests of their values, made at once, so that memory which changes
later changes no record. A stretch of tokens that one engine call sampled with one version of the
weights is a piece. Its positions are those in the sequence of prompt and response:

    [start, length, version, lineage, digest of all ids before it, of its ids, of its logprobs]

    op "made"   an engine call has returned: gid, member, its pieces, and whether the response or its turn has ended
    op "loss"   a micro-batch is used: step, rank, micro, members (each a `content`)
    op "batch"  a trainer begins to use a batch: step, rank, gids, and the members of each group

The records are events of `proofs.chaos.history`; `proofs.truth.oracle` compares them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import VersionSpan
from buffer.wire.sampling import SampleParams

if TYPE_CHECKING:
    # judges load this file for `score_of`, each in a process of its own
    from producer_workers.engines.base import Generation

Content = dict[str, Any]
Note = Callable[..., None]
"""Writes down an event: `History.note`."""

MOST_RUNS = 64
"""More runs of equal values than a sound mask has."""


def digest(column: NDArray[Any]) -> str:
    """Return 128 bits of a column's values."""
    return xxh3_128_hexdigest(np.ascontiguousarray(column).data)


def score_of(response_ids: NDArray[Any]) -> float:
    """Return the score that every judge gives these tokens; exact in float32."""
    return crc32(np.ascontiguousarray(response_ids, "<i4").data) % 1024 / 1024


def pieces(
    sequence: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    spans: Sequence[VersionSpan],
    first: int,
) -> list[list[Any]]:
    """Return the pieces of a sequence, whose token `first` has the first logprob; see above.

    `spans` count from there.
    """
    found = []
    for start, length, version, lineage in spans:
        begin, end = first + start, first + start + length
        found.append(
            [begin, length, version, lineage, digest(sequence[:begin]), digest(sequence[begin:end]),
             digest(logprobs[start : start + length])]
        )  # fmt: skip
    return found


def content(
    prompt_ids: NDArray[np.int32],
    response_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    mask: NDArray[Any],
    spans: Sequence[VersionSpan],
) -> Content:
    """Describe one rollout as a trainer has it.

    `at`: tokens of its prompt. `mask`: runs of equal values as [start, length, value].
    """
    sequence = np.concatenate([prompt_ids, response_ids]).astype("<i4", copy=False)
    return {
        "prompt": digest(sequence[: len(prompt_ids)]),
        "at": len(prompt_ids),
        "tokens": len(response_ids),
        "pieces": pieces(sequence, logprobs, spans, len(prompt_ids)),
        "mask": runs(mask),
        "score": score_of(response_ids),
    }


def runs(mask: NDArray[Any]) -> list[list[float]]:
    """Return the runs of equal values of a mask as [start, length, value]; the first MOST_RUNS."""
    starts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist()][:MOST_RUNS] if len(mask) else []
    ends = [*starts[1:], len(mask)]
    return [
        [start, end - start, float(mask[start])] for start, end in zip(starts, ends, strict=True)
    ]


def members_of(group: RolloutGroup) -> Iterator[Content]:
    ends = np.cumsum(group.lengths).tolist()
    spans = group.spans()
    for n, (end, length) in enumerate(zip(ends, group.lengths.tolist(), strict=True)):
        part = slice(end - length, end)
        columns = (group.response_ids[part], group.logprobs[part], group.mask[part])
        yield {
            "gid": group.gid,
            "member": int(group.columns["indices"][n]),
            "reward": float(group.scores[n]),
            **content(group.prompt_ids, *columns, spans[n]),
        }


class Witnessed:
    """Stands before an engine's class, and writes down what each of its calls returns.

    `note` is set before the first call:

        class WitnessedEngine(Witnessed, SimulatedEngine): ...
    """

    note: Note

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        given = prompt_ids.astype("<i4", copy=True)
        engine: Any = super()
        made: Generation = await engine.generate(request_id, prompt_ids, params)
        gid, member = request_id.split("/")[:2]
        sequence = np.concatenate([given, made.token_ids]).astype("<i4", copy=False)
        found = pieces(sequence, made.logprobs, made.spans, len(given))
        # one that is interrupted at its last token is not asked for more
        ended = made.finish_reason != "abort" or len(made.token_ids) >= params.max_tokens
        self.note("made", gid=gid, member=int(member), pieces=found, ended=ended)
        return made


assert sys.byteorder == "little", "columns are compared with those of the wire format"
