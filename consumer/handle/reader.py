"""Read the groups of a taken batch; find out which of them cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np

from buffer.errors import PayloadMissing, WireError
from buffer.job import PayloadRef
from buffer.manifest import Manifest
from buffer.run.run import Run
from buffer.wire.document import ids_of
from buffer.wire.group import RolloutGroup

LOWEST_LOGPROB = -50.0  # float32 samplers stay above about -25; workers use -9999 or so for "none"

HIGHEST_LOGPROB = 0.01  # 0 plus rounding: finds probabilities in place of logprobs


def check_content(group: RolloutGroup, vocabulary: int | None) -> None:
    """Raise WireError where a group cannot be trained, with the first wrong token.

    An id without an embedding ends the process; an impossible logprob gives a gradient that drowns
    all others. `vocabulary`: number of token ids; None: ids are not compared with it. Only logprobs
    of trained tokens (mask 1) are checked.
    """
    bounds = group.bounds
    largest = 2**31 - 1 if vocabulary is None else vocabulary - 1
    if bounds.largest_id > largest:
        _name_id(group, largest)
    if bounds.lowest_logprob >= LOWEST_LOGPROB and bounds.highest_logprob <= HIGHEST_LOGPROB:
        return
    logprobs = group.logprobs
    # nan compares as False
    is_plausible = (logprobs >= LOWEST_LOGPROB) & (logprobs <= HIGHEST_LOGPROB)
    wrong = ~is_plausible & (group.mask > 0)
    if wrong.any():
        position = int(wrong.argmax())
        raise WireError(
            f"the logprob {float(logprobs[position]):g} of trained token {position} is outside of "
            f"{LOWEST_LOGPROB:g} to 0",
            hint="submit the natural log of the probability with which each token was sampled, "
            "and mask 0 for tokens that were not sampled",
        )


def _name_id(group: RolloutGroup, largest: int) -> None:
    for name in ids_of(group.columns):
        ids = group.columns[name]
        # as unsigned numbers, negative ids are beyond any vocabulary
        wrong = ids.view(np.uint32) > largest
        if wrong.any():
            position = int(wrong.argmax())
            raise WireError(
                f"the token id {int(ids.flat[position])} in {name}, at {position}, is not in the "
                f"model's vocabulary of {largest + 1}",
                hint="let workers and trainer use the same model and tokenizer",
            )


Known = Mapping[PayloadRef, RolloutGroup]  # groups that were read ahead

NOTHING: Known = {}

Problems = dict[str, str]  # why groups cannot be used, by gid


class BatchReader:
    """Reads all groups of a batch; `trains`: also finds untrainable ones (`check_content`)."""

    def __init__(self, run: Run, *, trains: bool = True) -> None:
        self._buffer = run.buffer
        self._trains = trains
        self.vocabulary: int | None = None  # token ids of the model; None: ids are not compared

    def read(
        self, manifest: Manifest, known: Known = NOTHING
    ) -> tuple[list[RolloutGroup], Problems]:
        """Return the groups, or why some are unusable and to be replaced.

        Groups in `known` are not read.
        """
        if not manifest.entries:
            return [], {}
        try:
            groups = self._buffer.load(manifest, known)
        except (WireError, PayloadMissing):
            problems = _collect(
                (entry.gid, partial(self._buffer.read, entry.payload)) for entry in manifest.entries
            )
            if problems:
                return [], problems
            # it was read ahead
            groups = self._buffer.load(manifest)
        checked = groups if self._trains else []
        return groups, _collect(
            (group.gid, partial(check_content, group, self.vocabulary)) for group in checked
        )


def _collect(checks: Iterable[tuple[str, Callable[[], object]]]) -> Problems:
    """Return by gid what the checks of groups raise."""
    problems = {}
    for gid, check in checks:
        try:
            check()
        except (WireError, PayloadMissing) as error:
            problems[gid] = f"{type(error).__name__}: {error}"
    return problems
