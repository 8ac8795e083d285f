"""Response lengths by task and fate: what workers started, and what had a gradient.

Compared with each other, the two show whether a run forgets long responses (length bias), and what
took the difference.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

BOUNDS = np.unique(np.round(2 ** (np.arange(81) / 4))).astype(np.int64)
"""Upper bounds in tokens, from 8 on 1.2 times the one before, up to 1,048,576."""

MIDDLES = (np.append(BOUNDS, 2 * BOUNDS[-1]) + np.append(0, BOUNDS) + 1) / 2
"""The length that each bucket stands for; the last one has what is longer."""

WINDOW = 8192
"""Responses of which at least half are remembered: lengths change while a model learns."""

MOST_BYTES = 4000
"""Bound of the text of a worker; tasks beyond it are left out."""

FINISHED = "finished"
"""Fate of a response that no later stage lost: a worker submitted it, or it had a gradient."""

CUT = "+"
"""Behind a fate: of responses that were cut before their end, so they are at least that long."""

Counts = NDArray[np.float64]
Fates = Mapping[str, Counts]
"""Numbers of responses by fate and bucket."""

_FATE = re.compile(r"([\w.-]+):([a-z_]{1,20}\+?)=(\d{1,2})((?: \d{1,9}){1,80})", re.ASCII)


class LengthCounts:
    """Numbers of responses by task, fate and bucket. One thread adds; others may read."""

    def __init__(self) -> None:
        # a full newer half of the window takes the place of the older one
        self._newer: dict[str, dict[str, Counts]] = {}
        self._older: dict[str, dict[str, Counts]] = {}

    def add(
        self, task: str, fate: str, lengths: Sequence[int] | NDArray[np.int32], window: int = 0
    ) -> None:
        """Add lengths in tokens, and remember at least half of the last `window` responses.

        A fleet remembers a window per worker: lengths that change with the model would look like a
        bias if one of two that are compared reached further back.
        """
        if not len(lengths):
            return
        newer = self._newer.setdefault(task, {})
        if 2 * count(newer) >= max(WINDOW, window):
            self._older[task] = newer
            newer = self._newer[task] = {}
        places = np.searchsorted(BOUNDS, np.asarray(lengths, np.int64))
        newer[fate] = newer.get(fate, _none()) + np.bincount(places, minlength=len(MIDDLES))

    def by_task(self) -> dict[str, dict[str, Counts]]:
        found: dict[str, dict[str, Counts]] = {}
        for half in (self._older, self._newer):
            # lists first: another thread may add
            for task, fates in [*half.items()]:
                own = found.setdefault(task, {})
                for fate, counts in [*fates.items()]:
                    own[fate] = own.get(fate, _none()) + counts
        return found

    def text(self) -> str:
        """Return "task:fate=first count count …;…"; `first` is the first bucket with any."""
        text, by_task = "", self.by_task()
        for task in sorted(by_task, key=lambda task: -count(by_task[task])):
            parts = [text] if text else []
            for fate, counts in by_task[task].items():
                if places := np.flatnonzero(counts).tolist():
                    numbers = counts[places[0] : places[-1] + 1].astype(int).tolist()
                    parts.append(f"{task}:{fate}={places[0]} {' '.join(map(str, numbers))}")
            if len(longer := ";".join(parts)) > MOST_BYTES:
                break
            text = longer
        return text


def read_counts(texts: Iterable[str], times: float = 1.0) -> dict[str, dict[str, Counts]]:
    """Return the sum of workers' texts, `times` as much; what is malformed counts as missing."""
    found: defaultdict[str, dict[str, Counts]] = defaultdict(dict)
    for part in (part for text in texts for part in text.split(";")):
        match = _FATE.fullmatch(part)
        first, numbers = (int(match[3]), match[4].split()) if match else (0, [])
        if match and first + len(numbers) <= len(MIDDLES):
            counts = _none()
            counts[first : first + len(numbers)] = [int(number) * times for number in numbers]
            own = found[match[1]]
            own[match[2]] = own.get(match[2], _none()) + counts
    return dict(found)


def count(fates: Fates) -> int:
    """Return the number of responses of all fates."""
    return int(_sum(fates).sum())


def length_bias(trained: Mapping[str, Fates], started: Mapping[str, Fates]) -> dict[str, float]:
    """Return metrics of each task with both, in tokens and as ratios (1: unbiased).

    `started`: of workers, by what ended a response. `trained`: of taken batches, by what kept a
    response from a gradient. `length_bias/mean` is the mean length of what had a gradient over that
    of what was started; `/tail` the share of the former from the started p95 up over the share of
    the latter; `/FATE` the mean if nothing but this fate had taken responses away, and `/pool` if
    nothing but the pool had: groups that were finished, and not taken.
    """
    metrics: dict[str, float] = {}
    for task in sorted(trained.keys() & started.keys()):
        kept, ends = dict(trained[task]), whole_lengths(started[task])
        taken, whole = _sum(kept), _sum(ends)
        own, finished = kept.pop(FINISHED, _none()), ends.pop(FINISHED, _none())
        if not own.sum() or not finished.sum():
            continue
        tail = _bucket(whole, 0.95)
        ratios = {
            "mean": _mean(own) / _mean(whole),
            "tail": own[tail:].sum() / own.sum() / (whole[tail:].sum() / whole.sum()),
            "pool": _mean(taken) / _mean(finished),
        }
        ratios |= {fate: _mean(whole - lost) / _mean(whole) for fate, lost in ends.items()}
        ratios |= {fate: _mean(taken - lost) / _mean(taken) for fate, lost in kept.items()}
        metrics |= {f"length_bias/{name}/{task}": float(ratio) for name, ratio in ratios.items()}
        for name, counts in (("started", whole), ("trained", own)):
            metrics[f"{name}_len/mean/{task}"] = _mean(counts)
            metrics[f"{name}_len/p95/{task}"] = float(MIDDLES[_bucket(counts, 0.95)])
    return metrics


def whole_lengths(fates: Fates) -> dict[str, Counts]:
    """Return the numbers by fate, with an estimate of the whole lengths of what was cut.

    A response that was cut is as long as those that came further (Kaplan and Meier, 1958, in the
    form of Efron, 1967); where none did, as long as the longest.
    """
    every = _sum(fates)
    ended = _sum({fate: counts for fate, counts in fates.items() if not fate.endswith(CUT)})
    came = np.cumsum(every[::-1])[::-1]  # this far, or further
    left = np.cumprod(1 - np.divide(ended, came, out=_none(), where=came > 0))
    density = np.append(1.0, left[:-1]) - left
    buckets = np.arange(len(density))
    longest = np.flatnonzero(every)[-1:]
    density[longest] += left[-1]
    found: dict[str, Counts] = {}
    for fate, counts in fates.items():
        name, own = fate.removesuffix(CUT), counts
        if fate != name:
            own = _none()
            for bucket in np.flatnonzero(counts).tolist():
                further = np.where((buckets > bucket) | (buckets == longest), density, 0.0)
                own += counts[bucket] * further / further.sum()
        found[name] = found.get(name, _none()) + own
    return found


def _none() -> Counts:
    return np.zeros(len(MIDDLES))


def _sum(fates: Fates) -> Counts:
    total = _none()
    for counts in fates.values():
        total += counts
    return total


def _mean(counts: Counts) -> float:
    return float(counts @ MIDDLES / max(1e-9, counts.sum()))


def _bucket(counts: Counts, share: float) -> int:
    """Return the bucket of a quantile."""
    return int(np.searchsorted(np.cumsum(counts), share * counts.sum()))
