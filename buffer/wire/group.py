"""A group: the rollouts of one prompt, the unit of every queue.

Its numbers are columns over all rollouts, views of the received bytes, which a trainer packs
without an object per rollout. `states` makes the objects on first use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import GroupChanged, WireError
from buffer.wire.checks import Bounds, bounds_of
from buffer.wire.column import parts_of
from buffer.wire.columns import known_column
from buffer.wire.document import STATUSES, Columns, Document, Shared, optional_of, tokens_of
from buffer.wire.own_copy import own_copy
from buffer.wire.rollout import MediaRef, RolloutState, Status, VersionSpan, group_status
from buffer.wire.sampling import SampleParams
from buffer.wire.seal import Seal
from buffer.wire.staleness import ages, last_trained, living_version, token_mask
from buffer.wire.table import rollouts, spans_of, tabulate, values_of

UNPARSED = "unparsed"
"""The part of a reward that is 1 where a judge found no answer in the response, else 0."""

FEEDBACK = "feedback"
"""What a judge said of a rollout in words, in its `extra`."""

_EXPIRED = STATUSES.index(Status.EXPIRED)


GROUP_TIME = "group_time_s"
"""Key of `extra`: seconds that workers have spent on a group, over all its claims."""

OPEN_SESSIONS = "open_sessions"
SESSIONS_RESTARTED = "sessions_restarted"
NEW_CONTEXTS = "new_contexts"
LIVE_OPENING = "live_opening"
AGENT_RECORD = (OPEN_SESSIONS, SESSIONS_RESTARTED, NEW_CONTEXTS, LIVE_OPENING)
"""Keys of `extra`: what a loop of agents records of their sessions and contexts."""


def new_contexts(extra: Mapping[str, Any]) -> dict[str, int]:
    """Return how many contexts the agents of a group began anew, by reason."""
    written = extra.get(NEW_CONTEXTS)
    counts = written.items() if isinstance(written, dict) else ()
    return {why: count for why, count in counts if isinstance(count, int)}


class RolloutGroup:
    """The k rollouts of one prompt, as columns over all of them.

    Columns: prompt_ids int32[P], lengths int32[k], response_ids int32[sum R], logprobs
    float32[sum R], mask uint8[sum R], scores float32[k]. `optional_columns` and `values_of` have
    the columns that are rows of `buffer.wire.columns`.
    """

    turns: Sequence[RolloutState] = ()
    """What its agents have done since it was claimed, in order; see `KeptTurns`."""

    _seal: Seal | None = None  # of a received group
    _origin: RolloutGroup | None = None  # the received group that this one was made of

    _sampled_mask: NDArray[np.uint8] | None = None  # once `mask` was replaced

    def __init__(self, gid: str, task: str, states: Sequence[RolloutState]) -> None:
        if not states:
            raise WireError(f"group {gid} has no rollouts")
        try:
            self.head, self.columns = tabulate(gid, task, states)
        except WireError as error:
            raise WireError(f"group {gid}: {error.message}", hint=error.hint) from error
        self._states: list[RolloutState] | None = None
        self._bounds: Bounds | None = None

    @classmethod
    def received(
        cls, document: Document, columns: Columns, bounds: Bounds, seal: Seal
    ) -> RolloutGroup:
        """Return a group of parts that `buffer.wire.group_bytes` has checked."""
        group = cls.__new__(cls)
        group.head = document
        group.columns = columns
        group._seal = seal
        group._states = None
        group._bounds = bounds
        return group

    def continued(self, states: Sequence[RolloutState]) -> RolloutGroup:
        """Return the group of these rollouts, which were made from those of this one."""
        group = RolloutGroup(self.gid, self.task, states)
        group._origin = self._origin or self
        return group

    def __len__(self) -> int:
        return len(self.head.responses)

    @property
    def gid(self) -> str:
        return self.head.gid

    @property
    def task(self) -> str:
        return self.head.task

    @property
    def shared(self) -> Shared:
        """Return what the rollouts have in common: the prompt, and how they are sampled."""
        return self.head.shared

    @property
    def states(self) -> list[RolloutState]:
        """Return the rollouts as objects: copies, whose changes do not change the group."""
        if self._states is None:
            self._states = list(rollouts(self.head, self.columns))
        return self._states

    def check_unchanged(self) -> None:
        """Raise GroupChanged unless the received group is what the server sent.

        Call it before you store or publish a result of it.
        """
        given = self._origin or self
        if given._seal and (changed := given._seal.changed(given.head, given.columns)):
            raise GroupChanged(
                f"group {self.gid}: {changed} changed in memory after it was received",
                hint="trust nothing that was made of it. If your code replaces parts of groups or "
                "changes them in place, let it work on copies (`mask` may be assigned); if not, "
                "test this machine's memory and report this as a bug. Then start again: a trainer "
                "continues from its newest checkpoint",
            )

    def _replace(self, name: str, column: NDArray[Any]) -> None:
        if self._seal:
            self._seal.replace(name, column)
        else:
            self.columns[name] = column
        self._states = None

    # -- columns -------------------------------------------------------------

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        return self.columns["prompt_ids"]

    @property
    def lengths(self) -> NDArray[np.int32]:
        return self.columns["lengths"]

    @property
    def response_ids(self) -> NDArray[np.int32]:
        return self.columns["response_ids"]

    @property
    def logprobs(self) -> NDArray[np.float32]:
        return self.columns["logprobs"]

    @property
    def mask(self) -> NDArray[np.uint8]:
        """Return which response tokens are trained, uint8[sum R]. Another one may be assigned."""
        if "mask" not in self.columns:
            self._replace("mask", np.ones(len(self.response_ids), "u1"))
        return self.columns["mask"]

    @mask.setter
    def mask(self, mask: NDArray[np.uint8]) -> None:
        self._sampled_mask = self.sampled_mask
        self._replace("mask", mask)

    @property
    def sampled_mask(self) -> NDArray[np.uint8]:
        """Return which response tokens were sampled to be trained, uint8[sum R].

        It is the mask as the group was made, however `mask` has been cut since. Whatever compares
        rollouts by turn or position reads it.
        """
        return self.mask if self._sampled_mask is None else self._sampled_mask

    def optional_columns(self) -> dict[str, NDArray[Any]]:
        """Return the token columns of some groups, [sum R] or [sum R, k]; nan: no value.

        Names: those of `buffer.wire.columns`, such as `values`, and `teacher_logprobs/<teacher>`.
        A column with one value for each rollout is repeated for its tokens. Large columns are left
        out.
        """
        found = {}
        for name in optional_of(self.columns):
            column = known_column(name)
            for part, array in {} if column.is_large else parts_of(self.columns, name).items():
                per_token = array if column.per == "token" else np.repeat(array, self.lengths, 0)
                found[column.at(part)] = per_token
        return found

    def values_of(self, name: str) -> list[Any]:
        """Return a column of each member, in the form of `RolloutState`."""
        return values_of(self.head, self.columns, name)

    @property
    def bounds(self) -> Bounds:
        return self._bounds or bounds_of(self.columns)

    @property
    def scores(self) -> NDArray[np.float32]:
        """Return `reward["score"]` of each member, float32[k]; nan without one."""
        return self._rewards("score")

    @property
    def unparsed(self) -> int:
        """Return in how many members no judge found an answer."""
        if UNPARSED not in self.head.rewards:
            return 0
        return int(np.count_nonzero(self._rewards(UNPARSED) > 0))

    def sums(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Return the sum of a token column, [sum R], over each member, float64[k]."""
        member = np.repeat(np.arange(len(self)), self.lengths)
        return np.bincount(member, values, len(self)).astype(np.float64, copy=False)

    def _rewards(self, name: str) -> NDArray[np.float32]:
        if name not in self.head.rewards:
            return np.full(len(self), np.nan, "<f4")
        return self.columns["rewards"][:, self.head.rewards.index(name)].astype("<f4")

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """Return whether each rollout ended at its token limit, bool[k]."""
        reasons = self.head.finish_reasons
        if "length" not in reasons:
            return np.zeros(len(self), np.bool_)
        truncated: NDArray[np.bool_] = self.columns["finishes"] == reasons.index("length")
        return truncated

    @property
    def samples(self) -> list[SampleParams]:
        """Return how each rollout was sampled."""
        samples = [self.shared.sample] * len(self)
        for n, own in self.head.own:
            if isinstance(own.sample, SampleParams):
                samples[n] = own.sample
        return samples

    @property
    def errors(self) -> list[str]:
        return sorted({own.error for _, own in self.head.own if own.error})

    @property
    def multimodal(self) -> list[MediaRef]:
        """Return the prompt's images in token order."""
        return own_copy(self.shared.multimodal)

    @property
    def sessions(self) -> list[str]:
        """Return each member's session; segments of one share it, others have their own."""
        sessions = [f"#{n}" for n in range(len(self))]
        for n, own in self.head.own:
            if own.session_id:
                sessions[n] = f"{int(self.columns['indices'][n])}/{own.session_id}"
        return sessions

    @property
    def roles(self) -> list[str]:
        """Return the role of each member; "" without one."""
        roles = [""] * len(self)
        for n, own in self.head.own:
            roles[n] = own.role
        return roles

    @property
    def in_training(self) -> NDArray[np.bool_]:
        """Return whether each member is of a role that is trained, bool[k]; all if none is.

        A role is trained if any of its tokens was sampled to be.
        """
        roles = np.array(self.roles)
        if (roles != roles[0]).any():
            trained = self.sums(self.sampled_mask) > 0
            if trained.any():
                return np.isin(roles, roles[trained])
        return np.ones(len(self), np.bool_)

    @property
    def status(self) -> Status:
        return group_status(STATUSES[code] for code in set(self.columns["statuses"].tolist()))

    # -- ages ----------------------------------------------------------------

    def oldest(self) -> VersionSpan | None:
        """Return the span with the oldest policy version; None where no token was sampled."""
        spans = (span for spans in self.spans() for span in spans)
        return min((s for s in spans if s.length), key=lambda s: s.version, default=None)

    @property
    def sampled_tokens(self) -> int:
        """Return how many response tokens an engine sampled: those that have a version."""
        return int(self.columns["spans"][:, 2].sum()) if "spans" in self.columns else 0

    def tokens_by_weights(self) -> str:
        """Return how many tokens each weights sampled: `LINEAGE:VERSION:TOKENS …`."""
        found = Counter[str]()
        for spans in self.spans():
            for span in spans:
                found[f"{span.lineage}:{span.version}"] += span.length
        return " ".join(f"{weights}:{tokens}" for weights, tokens in found.items() if tokens)

    def oldest_by_lineage(self) -> dict[str, int]:
        """Return the oldest policy version of each lineage of weights in the group."""
        # of all lineages, because only the server knows which are still in use
        oldest: dict[str, int] = {}
        for spans in self.spans():
            for span in spans:
                if span.length:
                    known = oldest.get(span.lineage, span.version)
                    oldest[span.lineage] = min(span.version, known)
        return oldest

    def made_by(self, by_token: bool) -> str:
        """Return the weights for scripts: `oldest LINEAGE VERSION,…`, newest and last as well."""
        rows = self.columns["spans"].tolist() if "spans" in self.columns else []
        weights = {(lineage, version) for _, _, length, version, lineage in rows if length}
        expired = _EXPIRED in self.columns["statuses"].tolist()
        if len(weights) == 1 and not expired and not by_token:
            ((lineage, version),) = weights
            return f"oldest {self.head.lineages[lineage]} {version}"
        found = {"oldest": self.oldest_by_lineage(), "newest": self.newest_by_lineage(by_token)}
        if by_token:
            found["last"] = self.last_by_lineage()
        return ages(found)

    def last_by_lineage(self) -> dict[str, int]:
        """Return the newest version that keeps every rollout trainable, by lineage of weights.

        This is the oldest, over the rollouts whose trained tokens all have a version, of the
        newest version in their last lineage. Other rollouts never expire by token.
        """
        found: dict[str, int] = {}
        for part, spans in self._parts():
            if last := last_trained(self.mask[part], spans):
                version = last.version
                found[last.lineage] = min(version, found.get(last.lineage, version))
        return found

    def newest_by_lineage(self, by_token: bool) -> dict[str, int]:
        """Return the newest of the members' oldest versions, by its lineage of weights.

        Empty if all members are of one age (`by_token`: with their last tokens, too): then none
        can be kept without the others.
        """
        found_ages: set[tuple[Any, ...]] = set()
        newest: dict[str, int] = {}
        codes = self.columns["statuses"].tolist()
        for code, (part, found) in zip(codes, self._parts(), strict=True):
            spans = [span for span in found if span.length]
            if not spans:
                continue
            if STATUSES[code] is Status.EXPIRED:
                found_ages.add(())
                continue
            oldest = min(spans, key=lambda s: s.version)
            last = last_trained(self.mask[part], spans) if by_token else None
            found_ages.add((oldest[2:], last and last[2:]))
            newest[oldest.lineage] = max(oldest.version, newest.get(oldest.lineage, 0))
        return newest if len(found_ages) > 1 else {}

    def fresh_mask(
        self, step: int, token_threshold: int | None, forks: Sequence[tuple[str, int]] = ()
    ) -> NDArray[np.uint8]:
        """Return the mask without tokens too old for the step, uint8[sum R] (`token_mask`)."""
        masks = []
        for part, spans in self._parts():
            own = self.mask[part]
            aged = [s._replace(version=living_version(forks, s.lineage, s.version)) for s in spans]
            fresh = token_mask(own, part.stop - part.start, aged, step, token_threshold)
            masks.append(own if fresh is None else fresh)
        return np.concatenate(masks)

    def spans(self) -> list[list[VersionSpan]]:
        return spans_of(self.head, self.columns)

    def _parts(self) -> Iterator[tuple[slice, list[VersionSpan]]]:
        """Yield each rollout's part of the token columns, and its spans."""
        return zip(tokens_of(self.columns), self.spans(), strict=True)
