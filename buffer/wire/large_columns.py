"""Columns of megabytes, which engines record: judges do without, and files may have them.

A value is an array or a `SamplingMask`, or the address of its file. A `LargeColumn` has three more
methods: `then` returns the value of a sequence of `tokens` with another of `new` tokens behind it
(`is_read`: whether an engine has read these), `behind` that of a sequence without its `first`
tokens, and `before` that of its first `end` tokens (None: of all) as context alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from buffer.errors import WireError
from buffer.wire.column import Array, Arrays, Column, Layout, Rollout, as_column
from buffer.wire.sampling_mask import SamplingMask, joined_masks


class RowsColumn(Column):
    """A column with a row for each token that the model read: of prompt and response, but the last.

    Parts: `rows`, and `of`, uint8[k]: 1 for a rollout that has rows.
    """

    is_large = True

    def layout(self, part: str) -> Layout | None:
        if part == "rows":
            return Layout(np.dtype(self.dtype), 1 + self.inner, "")
        return Layout(np.dtype("u1"), 1, "rollout") if part == "of" else None

    def _read(self, value: Any) -> Any:
        return value if isinstance(value, str) else as_column(value, self.dtype)

    def problem(self, value: Any, state: Rollout) -> str:
        prompt = 0 if state.prompt_ids is None else len(state.prompt_ids)
        rows = rows_of(prompt, len(state.response_ids))
        if isinstance(value, str) or (value.ndim == 1 + self.inner and len(value) == rows):
            return ""
        return f"{self.name} has shape {list(value.shape)}, expected {rows} rows"

    def grown(self, value: Any, done: int, made: Any, new: int) -> Any:
        """Return what was made of the whole sequence, with the known rows in their place.

        These are from the pass that sampled their tokens.
        """
        if not new or not isinstance(value, np.ndarray) or not isinstance(made, np.ndarray):
            return made if new else value
        return np.concatenate([value, as_column(made[len(value) :], self.dtype)])

    def then(self, value: Any, tokens: int, more: Any, new: int, *, is_read: bool) -> Any:
        if isinstance(value, np.ndarray) and isinstance(more, np.ndarray):
            return np.concatenate([value, more])
        return None if is_read else value  # the next pass adds those of the whole

    def shifted(self, value: Any, before: int, prompt: int) -> Any:
        return value  # of prompt and response, wherever one ends

    def to_fields(self, value: Any) -> dict[str, Any]:
        return {}  # exported files do without it

    def of_fields(self, *given: Any) -> Any:
        return None

    def behind(self, value: Any, first: int) -> Any:
        return value[first:] if isinstance(value, np.ndarray) else value

    def before(self, value: Any, end: int | None) -> Any:
        if end is None:
            return value
        return value[: end - 1] if isinstance(value, np.ndarray) else None

    def joined(self, values: Sequence[Any], lengths: Sequence[int]) -> dict[str, Array]:
        inline = [rows for rows in values if isinstance(rows, np.ndarray)]
        if len({rows.shape[1:] for rows in inline}) > 1:
            shapes = [list(rows.shape) for rows in inline]
            raise WireError(f"{self.name} have different shapes: {shapes}")
        if not inline:
            return {}
        has = np.array([isinstance(rows, np.ndarray) for rows in values], "u1")
        return {self.at("rows"): np.concatenate(inline), self.at("of"): has}

    def split(self, columns: Arrays, tokens: Sequence[slice], prompt: int) -> list[Any]:
        rows, has = columns[self.at("rows")], columns[self.at("of")]
        found: list[Any] = [None] * len(tokens)
        start = 0
        for n in np.flatnonzero(has).tolist():
            end = start + rows_of(prompt, tokens[n].stop - tokens[n].start)
            found[n] = rows[start:end]
            start = end
        return found

    def check(self, columns: Arrays, lengths: Sequence[int], prompt: int) -> None:
        rows, has = (columns.get(self.at(part)) for part in ("rows", "of"))
        if rows is None or has is None or not has.any():
            raise WireError(f"at columns: {self.at('rows')} and {self.at('of')} need each other")
        if has.max() > 1:
            raise WireError(f"at columns.{self.at('of')}: a value that is neither 0 nor 1")
        at = f"at columns.{self.at('rows')}"
        if min(rows.shape) < 1:
            raise WireError(f"{at}: shape {list(rows.shape)}")
        needed = sum(rows_of(prompt, lengths[n]) for n in np.flatnonzero(has).tolist())
        if len(rows) != needed:
            raise WireError(f"{at}: {len(rows)} rows, its rollouts have {needed}")
        if problem := self._out_of_bounds(rows.min(), rows.max()):
            raise WireError(f"{at}: {problem}")


class RaggedColumn(Column):
    """A column with any number of ids for each response token, its own among them.

    Values are `SamplingMask`s. Parts: `counts`, and `ids`, int32[sum of counts].
    """

    is_large = True

    def layout(self, part: str) -> Layout | None:
        if part == "ids":
            return Layout(np.dtype(self.dtype), 1, "", self.holds_ids)
        return Layout(np.dtype("<i4"), 1, "token") if part == "counts" else None

    def _read(self, value: Any) -> Any:
        if not isinstance(value, str | SamplingMask):
            raise ValueError("not a SamplingMask")
        return value

    def problem(self, value: Any, state: Rollout) -> str:
        problem = "" if isinstance(value, str) else value.problem(state.response_ids)
        return f"{self.name}: {problem}" if problem else ""

    def grown(self, value: Any, done: int, made: Any, new: int) -> Any:
        return joined_masks([(value, done), (made, new)]) if new else value

    def then(self, value: Any, tokens: int, more: Any, new: int, *, is_read: bool) -> Any:
        return joined_masks([(value, tokens), (more, new)])

    def shifted(self, value: Any, before: int, prompt: int) -> Any:
        tokens = len(value.counts) if isinstance(value, SamplingMask) else 0
        return self.behind(joined_masks([(None, before), (value, tokens)]), prompt)

    def to_fields(self, value: Any) -> dict[str, Any]:
        stem = self.name.removesuffix("_mask")
        pair = (value.counts, value.ids) if isinstance(value, SamplingMask) else (None, None)
        return {f"{stem}_counts": pair[0], f"{stem}_ids": pair[1]}

    def of_fields(self, *given: Any) -> Any:
        if not any(own is not None and len(own) for own in given):
            return None
        counts, ids = (as_column([] if own is None else own, self.dtype) for own in given)
        return SamplingMask(counts, ids)

    def behind(self, value: Any, first: int) -> Any:
        # an address stays: its file counts from the last token
        return value.part(slice(first, None)) if isinstance(value, SamplingMask) else value

    def before(self, value: Any, end: int | None) -> Any:
        return None

    def joined(self, values: Sequence[Any], lengths: Sequence[int]) -> dict[str, Array]:
        inline = [value if isinstance(value, SamplingMask) else None for value in values]
        whole = joined_masks(zip(inline, lengths, strict=True))
        if not isinstance(whole, SamplingMask):
            return {}
        return {self.at("counts"): whole.counts, self.at("ids"): whole.ids}

    def split(self, columns: Arrays, tokens: Sequence[slice], prompt: int) -> list[Any]:
        counts, ids = columns[self.at("counts")], columns[self.at("ids")]
        found: list[Any] = []
        first = 0
        for part in tokens:
            own = counts[part]
            end = first + int(own.sum(dtype=np.int64))
            found.append(SamplingMask(own, ids[first:end]) if end > first else None)
            first = end
        return found

    def check(self, columns: Arrays, lengths: Sequence[int], prompt: int) -> None:
        counts, ids = (columns.get(self.at(part)) for part in ("counts", "ids"))
        if counts is None or ids is None:
            raise WireError(f"at columns: {self.at('counts')} and {self.at('ids')} need each other")
        if problem := SamplingMask(counts, ids).problem(columns["response_ids"]):
            raise WireError(f"at columns.{self.at('ids')}: {self.name} is wrong: {problem}")


LargeColumn = RowsColumn | RaggedColumn


def rows_of(prompt: int, response: int) -> int:
    """Return the number of tokens that the model read: all but the last one of the response."""
    return max(prompt + response - 1, 0)
