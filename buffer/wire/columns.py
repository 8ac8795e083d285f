"""The registry of the optional columns of a rollout: what is done with each is its row's business.

`COLUMNS` has the project's own, which are fields of `RolloutState`. An installed package attaches
others by entry points of the group `rolloutmq.columns`; they are in `RolloutState.columns`.

An array of a document has the name of its column, or `column/part` if a column has several.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ConfigError, WireError
from buffer.imports import attached, load_object
from buffer.wire.sampling_mask import SamplingMask, joined_masks

if TYPE_CHECKING:
    from buffer.wire.rollout import RolloutState

Number = Real | np.bool_
"""To Python, a bool of numpy is not a number."""

Array = NDArray[Any]
Arrays = Mapping[str, Array]

NAME_LENGTH = 128
"""Characters of a part's name, such as a teacher's."""


class Layout(NamedTuple):
    """How an array of a document is laid out. `axis`: what its first dimension counts, or ""."""

    dtype: np.dtype[Any]
    ndim: int
    axis: Literal["rollout", "token", ""]
    holds_ids: bool = False


def as_column(value: Any, dtype: str) -> Array:
    """Return `value` as a column. Raises ValueError for integers that numpy would wrap around."""
    raw = np.asarray(value)
    if raw.dtype == dtype:
        return np.ascontiguousarray(raw)
    if np.dtype(dtype).kind == "f":
        with np.errstate(over="ignore"):  # a number beyond the range becomes infinite
            return np.ascontiguousarray(raw, dtype)
    try:
        with np.errstate(invalid="ignore"):
            column = np.ascontiguousarray(raw, dtype)
    except OverflowError as error:
        raise ValueError(str(error)) from error
    if not np.array_equal(column, raw):
        raise ValueError(f"{raw[column != raw].flat[0]} does not fit into {np.dtype(dtype).name}")
    return column


def read_only(column: Array) -> Array:
    view = column.view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True, eq=False)
class Column:
    """A column with one value for each response token of a rollout, or one for the rollout.

    `name`: an identifier. `dtype`: in numpy's notation, little-endian. `inner`: further dimensions
    of a value. `per`: "token", or "rollout" for one value. `named`: a rollout has several, by name.
    `absent`: what stands for a rollout without the column; it is no value. `pad`: what fills up a
    value that has fewer numbers than those of other groups. `lowest`, `highest`: bounds of values.
    `holds_ids`: values are ids of the model's vocabulary. `beside`: columns of the same shape that
    a rollout with this one has, too; where it is a column of integers, the first says where values
    are absent. `resets`: new tokens discard the column; otherwise they get 0.
    """

    name: str
    dtype: str = "<f4"
    inner: int = 0
    per: Literal["token", "rollout"] = "token"
    named: bool = False
    absent: float = np.nan
    pad: float = 0
    lowest: float = -np.inf
    highest: float = np.inf
    holds_ids: bool = False
    beside: tuple[str, ...] = ()
    resets: bool = True

    is_large = False
    """whether it has megabytes: then judges and readers do not get it, and it may be in a file"""

    def __post_init__(self) -> None:
        if not self.is_large and not self.is_float and np.isnan(self.absent):
            raise ConfigError(f"the column {self.name} has integers, and no value for `absent`")

    @cached_property
    def is_float(self) -> bool:
        return np.dtype(self.dtype).kind == "f"

    @cached_property
    def _layout(self) -> Layout:
        return Layout(np.dtype(self.dtype), 1 + self.inner, self.per, self.holds_ids)

    def layout(self, part: str) -> Layout | None:
        """Return the layout of an array in documents; None if the column has no such part."""
        return self._layout if bool(part) == self.named and len(part) <= NAME_LENGTH else None

    # -- in a rollout --------------------------------------------------------

    def get(self, state: RolloutState) -> Any:
        """Return the value of a rollout: None, an array or number, or these by name."""
        return getattr(state, self.name) if self.name in COLUMNS else state.columns.get(self.name)

    def set(self, state: RolloutState, value: Any) -> None:
        if self.name in COLUMNS:
            setattr(state, self.name, value)
        else:
            state.columns = {**state.columns, self.name: value}

    def read(self, value: Any) -> Any:
        """Return what somebody gave as a value of the column. Raises ValueError, which names it."""
        try:
            return self._read(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{self.name}: {error}") from error

    def _read(self, value: Any) -> Any:
        if not self.named:
            return self._numbers(value)
        if not isinstance(value, Mapping) or not all(
            isinstance(name, str) and name.isprintable() and 0 < len(name) <= NAME_LENGTH
            for name in value
        ):
            raise ValueError("values are by name")
        return {name: self._numbers(own) for name, own in value.items()}

    def _numbers(self, value: Any) -> Any:
        is_number = self.per == "rollout" and not self.inner
        if is_number and np.ndim(value):
            raise ValueError("expected one number for each rollout")
        array = as_column([value] if is_number else value, self.dtype)
        if self.is_float and not np.isfinite(array).all():
            raise ValueError("a value that is not finite")
        if array.size and (problem := self._out_of_bounds(array.min(), array.max())):
            raise ValueError(problem)
        return array.item() if is_number else array

    def parts(self, value: Any) -> Mapping[str, Any]:
        """Return a rollout's arrays or numbers by part."""
        if value is None:
            return {}
        return value if self.named else {"": value}

    def problem(self, value: Any, state: RolloutState) -> str:
        """Return why this cannot be the value of a rollout; "" if it can."""
        if self.per == "rollout":
            return ""
        tokens = len(state.response_ids)
        for part, array in self.parts(value).items():
            label = self.name if not part else f"{self.name} of {part!r}"
            if array.ndim != 1 + self.inner or 0 in array.shape[1:]:
                expected = ", ".join([str(tokens), *["k"] * self.inner])
                return f"{label} has shape {list(array.shape)}, expected [{expected}]"
            if len(array) != tokens:
                return f"{len(array)} {label} for {tokens} response tokens"
            for name in self.beside:
                beside = known_column(name)
                other = beside.parts(beside.get(state)).get(part)
                if other is None or not _have_one_shape(array, other):
                    return f"{label} needs {name} of the same shape"
        return ""

    def grown(self, value: Any, done: int, made: Any, new: int) -> Any:
        """Return the value after `new` more tokens, for which an engine may have `made` one."""
        if not new or (self.per == "rollout" and made is None and not self.resets):
            return value
        if self.per == "rollout" or not done:
            return made
        known, own = self.parts(value), self.parts(made)
        if made is None and not self.resets:
            own = {
                part: np.zeros((new, *array.shape[1:]), self.dtype) for part, array in known.items()
            }
        whole = {part: np.concatenate([known[part], own[part]]) for part in own if part in known}
        return (whole or None) if self.named else whole.get("")

    def shifted(self, value: Any, before: int, prompt: int) -> Any:
        """Return the value of the sequence without its first tokens, `prompt` of them.

        `before`: how many it was without so far; these get 0.
        """
        if self.per == "rollout":
            return value
        parts = {}
        for part, array in self.parts(value).items():
            zeros = np.zeros((before, *array.shape[1:]), array.dtype)
            parts[part] = np.concatenate([zeros, array])[prompt:]
        return (parts or None) if self.named else parts.get("")

    # -- in a document -------------------------------------------------------

    def at(self, part: str) -> str:
        return f"{self.name}/{part}" if part else self.name

    def joined(self, values: Sequence[Any], lengths: Sequence[int]) -> dict[str, Array]:
        """Return the arrays of a document, from the values of its rollouts. Raises WireError."""
        found = [self.parts(value) for value in values]
        if self.per == "rollout":
            names = sorted({part for own in found for part in own})
            return {
                self.at(part): self._of_rollouts([own.get(part) for own in found]) for part in names
            }
        names = sorted({part for own in found for part, array in own.items() if len(array)})
        return {
            self.at(part): self._joined(self.at(part), [own.get(part) for own in found], lengths)
            for part in names
        }

    def _of_rollouts(self, values: Sequence[Any]) -> Array:
        shape = next(np.shape(value) for value in values if value is not None)
        without = np.full(shape, self.absent, self.dtype)
        return np.array([without if value is None else value for value in values], self.dtype)

    def _joined(self, at: str, arrays: Sequence[Array | None], lengths: Sequence[int]) -> Array:
        inner = {array.shape[1:] for array in arrays if array is not None and len(array)}
        if len(inner) > 1:
            raise WireError(f"{at} has different shapes in rollouts of a group: {sorted(inner)}")
        (shape,) = inner
        parts = []
        for array, tokens in zip(arrays, lengths, strict=True):
            if array is None or not tokens:
                array = np.full((tokens, *shape), self.absent, self.dtype)
            if len(array) != tokens:
                raise WireError(f"{at}: {len(array)} values for {tokens} response tokens")
            parts.append(array)
        whole: Array = np.concatenate(parts)
        return whole

    def split(self, columns: Arrays, tokens: Sequence[slice], prompt: int) -> list[Any]:
        """Return the value of each rollout, whose response is the part `tokens` of a group's."""
        given: list[dict[str, Any]] = [{} for _ in tokens]
        for part, array in parts_of(columns, self.name).items():
            if self.per == "rollout":
                values = array if self.inner else array.tolist()
                signs = self._are_absent(columns, part).tolist()
                found = [(n, values[n]) for n, is_absent in enumerate(signs) if not is_absent]
            else:
                filled = [(n, own) for n, own in enumerate(tokens) if own.start < own.stop]
                starts = np.array([own.start for _, own in filled], np.intp)
                signs = self._are_absent(columns, part, starts).tolist()
                pairs = zip(filled, signs, strict=True)
                found = [(n, array[own]) for (n, own), is_absent in pairs if not is_absent]
            for n, value in found:
                given[n][part] = value
        return [(own or None) if self.named else own.get("") for own in given]

    def _are_absent(
        self, columns: Arrays, part: str, places: slice | NDArray[np.intp] = slice(None)
    ) -> NDArray[np.bool_]:
        """Return where an array has no values: bool[places], by its first dimension."""
        sign = columns[self.at(part)]
        if self.beside and not self.is_float:
            sign = columns[f"{self.beside[0]}/{part}" if part else self.beside[0]]
        firsts = sign.reshape(len(sign), -1)[places, 0] if sign.ndim > 1 else sign[places]
        absent: NDArray[np.bool_]
        absent = np.isnan(firsts) if firsts.dtype.kind == "f" else firsts == self.absent
        return absent

    def check(self, columns: Arrays, lengths: Sequence[int], prompt: int) -> None:
        """Check the arrays of a group, whose first dimensions are right. Raises WireError."""
        for part, array in parts_of(columns, self.name).items():
            if problem := self._wrong(columns, part, array, lengths):
                raise WireError(f"at columns.{self.at(part)}: {problem}")

    def _wrong(self, columns: Arrays, part: str, array: Array, lengths: Sequence[int]) -> str:
        for name in self.beside:
            other = columns.get(f"{name}/{part}" if part else name)
            if other is None or not _have_one_shape(array, other):
                return f"{self.name} and {name} of one shape need each other"
        if not array.size:
            return f"no rollout has a value: shape {list(array.shape)}"
        ends = np.minimum.reduce(array, axis=None), np.maximum.reduce(array, axis=None)
        if self.is_float and not (math.isfinite(ends[0]) and math.isfinite(ends[1])):
            if np.isinf(array).any():
                return "an infinite value"
            if self.inner and (self._are_absent(columns, part) != np.isnan(array).T).any():
                return "NaN for some of a value's numbers, but not for all"
        elif self.is_float or self.beside:
            return self._out_of_bounds(*ends)
        absent = self._are_absent(columns, part)
        if absent.all():
            return "no rollout has a value"
        if self.per == "token" and _is_partly(absent, lengths):
            return "no value for some tokens of a rollout that has others"
        values = array[~absent]
        return self._out_of_bounds(values.min(), values.max())

    def _out_of_bounds(self, smallest: Any, largest: Any) -> str:
        if smallest < self.lowest:
            return f"a value below {self.lowest:g}"
        return f"a value above {self.highest:g}" if largest > self.highest else ""

    # -- elsewhere -----------------------------------------------------------

    def is_answer(self, value: Any) -> bool:
        """Return whether a judge's value of this name is the column, and no part of the reward."""
        return not self.is_large and (self.per == "rollout" or not isinstance(value, Number))

    def plain(self, value: Any) -> Any:
        """Return a value as lists and numbers, for JSON and other processes."""
        plain = {part: np.asarray(own).tolist() for part, own in self.parts(value).items()}
        return (plain or None) if self.named else plain.get("")

    @property
    def fields(self) -> tuple[str, ...]:
        """The names under which a line of an exported file has the column."""
        return (self.name,)

    def to_fields(self, value: Any) -> tuple[Any, ...]:
        """Return a value, or None, for each of `fields`."""
        return (value,)

    def of_fields(self, *given: Any) -> Any:
        """Return the value that `to_fields` has written. Raises ValueError."""
        return None if given[0] is None else self.read(given[0])

    def widened(self, array: Array | None, shape: tuple[int, ...]) -> Array:
        """Return a group's array in a shape that fits all groups of a batch."""
        if array is None:
            return np.full(shape, self.absent, self.dtype)
        if array.shape == shape:
            return array
        wide = np.full(shape, self.pad, self.dtype)
        wide[tuple(map(slice, array.shape))] = array
        return wide


def _have_one_shape(array: Array, other: Array) -> bool:
    dimensions = min(array.ndim, other.ndim)
    return array.shape[:dimensions] == other.shape[:dimensions]


def _is_partly(missing: NDArray[np.bool_], lengths: Sequence[int]) -> bool:
    """Return whether a rollout has values for some of its tokens, but not for all."""
    counts = np.add.reduceat(np.append(missing, False).astype("<i8"), np.cumsum([0, *lengths[:-1]]))
    given = np.array(lengths)
    return bool(((given > 0) & (counts > 0) & (counts < given)).any())


class LargeColumn(Column):
    """A column of megabytes, recorded by an engine: an array or so, or the address of its file."""

    is_large = True

    def problem(self, value: Any, state: RolloutState) -> str:
        return "" if isinstance(value, str) else self._problem(value, state)

    def _problem(self, value: Any, state: RolloutState) -> str:
        raise NotImplementedError

    def read_only(self, value: Any) -> Any:
        """Return a view that cannot be written to; an address as it is."""
        raise NotImplementedError

    def packed(self, value: Any) -> Array:
        """Return the array that is stored in a file."""
        raise NotImplementedError

    def then(self, value: Any, tokens: int, more: Any, new: int, *, is_read: bool) -> Any:
        """Return the value of a sequence of `tokens` with another of `new` tokens behind it.

        `is_read`: whether an engine has read the new ones.
        """
        raise NotImplementedError

    def of_sequence(self, value: Any, prompt: int, response: int) -> Any:
        """Return the value of a rollout for its whole sequence, as if all were the response."""
        raise NotImplementedError

    def of_response(self, value: Any, prompt: int, tokens: int) -> Any:
        """Return the value of a rollout from that of its whole sequence of `tokens`."""
        raise NotImplementedError

    def behind(self, value: Any, first: int) -> Any:
        """Return the value of a sequence without its `first` tokens."""
        raise NotImplementedError

    def before(self, value: Any, end: int | None) -> Any:
        """Return the value of a sequence, or its first `end` tokens, as context alone."""
        raise NotImplementedError


class RowsColumn(LargeColumn):
    """A column with a row for each token that the model read: of prompt and response, but the last.

    Parts: `rows`, and `of`, uint8[k]: 1 for a rollout that has rows.
    """

    def layout(self, part: str) -> Layout | None:
        if part == "rows":
            return Layout(np.dtype(self.dtype), 1 + self.inner, "")
        return Layout(np.dtype("u1"), 1, "rollout") if part == "of" else None

    def _read(self, value: Any) -> Any:
        return value if isinstance(value, str) else as_column(value, self.dtype)

    def _problem(self, value: Any, state: RolloutState) -> str:
        prompt = 0 if state.prompt_ids is None else len(state.prompt_ids)
        rows = rows_of(prompt, len(state.response_ids))
        if value.ndim == 1 + self.inner and len(value) == rows:
            return ""
        return f"{self.name} has shape {list(value.shape)}, expected {rows} rows"

    def grown(self, value: Any, done: int, made: Any, new: int) -> Any:
        """Return what was made of the whole sequence, with the known rows in their place.

        These are from the pass that sampled their tokens.
        """
        if not new or not isinstance(value, np.ndarray) or not isinstance(made, np.ndarray):
            return made if new else value
        return np.concatenate([value, as_column(made[len(value) :], self.dtype)])

    def read_only(self, value: Any) -> Any:
        return read_only(value) if isinstance(value, np.ndarray) else value

    def packed(self, value: Any) -> Array:
        packed: Array = value
        return packed

    def then(self, value: Any, tokens: int, more: Any, new: int, *, is_read: bool) -> Any:
        if isinstance(value, np.ndarray) and isinstance(more, np.ndarray):
            return np.concatenate([value, more])
        return None if is_read else value  # the next pass adds those of the whole

    def of_sequence(self, value: Any, prompt: int, response: int) -> Any:
        return value

    def of_response(self, value: Any, prompt: int, tokens: int) -> Any:
        return value

    fields = ()  # exported files do without it

    def to_fields(self, value: Any) -> tuple[Any, ...]:
        return ()

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


class RaggedColumn(LargeColumn):
    """A column with any number of ids for each response token, its own among them.

    Values are `SamplingMask`s. Parts: `counts`, and `ids`, int32[sum of counts].
    """

    def layout(self, part: str) -> Layout | None:
        if part == "ids":
            return Layout(np.dtype(self.dtype), 1, "", self.holds_ids)
        return Layout(np.dtype("<i4"), 1, "token") if part == "counts" else None

    def _read(self, value: Any) -> Any:
        if not isinstance(value, str | SamplingMask):
            raise ValueError("not a SamplingMask")
        return value

    def _problem(self, value: Any, state: RolloutState) -> str:
        problem = value.problem(state.response_ids)
        return f"{self.name}: {problem}" if problem else ""

    def grown(self, value: Any, done: int, made: Any, new: int) -> Any:
        return joined_masks([(value, done), (made, new)]) if new else value

    def then(self, value: Any, tokens: int, more: Any, new: int, *, is_read: bool) -> Any:
        return joined_masks([(value, tokens), (more, new)])

    def of_sequence(self, value: Any, prompt: int, response: int) -> Any:
        return joined_masks([(None, prompt), (value, response)])

    def of_response(self, value: Any, prompt: int, tokens: int) -> Any:
        return self.behind(value, prompt)

    def read_only(self, value: Any) -> Any:
        return value.read_only() if isinstance(value, SamplingMask) else value

    def packed(self, value: Any) -> Array:
        packed: Array = value.packed()
        return packed

    @property
    def fields(self) -> tuple[str, ...]:
        stem = self.name.removesuffix("_mask")
        return f"{stem}_counts", f"{stem}_ids"

    def to_fields(self, value: Any) -> tuple[Any, ...]:
        return (value.counts, value.ids) if isinstance(value, SamplingMask) else (None, None)

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


def rows_of(prompt: int, response: int) -> int:
    """Return the number of tokens that the model read: all but the last one of the response."""
    return max(prompt + response - 1, 0)


def _by_name(columns: Iterable[Column]) -> dict[str, Column]:
    return {column.name: column for column in columns}


COLUMNS: Mapping[str, Column] = _by_name(
    (
        Column("ref_logprobs"),
        Column("values"),
        Column("token_rewards", resets=False),
        Column("teacher_logprobs", named=True),
        Column(
            *("teacher_top_ids", "<i4", 1),
            named=True,
            absent=0,
            lowest=0,
            holds_ids=True,
            beside=("teacher_top_logprobs",),
        ),
        Column(
            *("teacher_top_logprobs", "<f4", 1),
            named=True,
            pad=-np.inf,
            beside=("teacher_top_ids", "teacher_logprobs"),
        ),
        RowsColumn("routed_experts", "<i2", 2, lowest=0),
        RaggedColumn("sampling_mask", "<i4", holds_ids=True),
    )
)


@cache
def attached_columns() -> Mapping[str, Column]:
    """Return the columns of installed packages. Raises ConfigError for what is no column."""
    found = {}
    for name, path in attached("rolloutmq.columns").items():
        column = load_object(path, kind="column")
        if not isinstance(column, Column) or column.name != name or not name.isidentifier():
            raise ConfigError(f"{path} is no Column with the name {name!r}")
        if name in COLUMNS:
            raise ConfigError(f"{path}: the column {name} is rolloutmq's own", hint="rename it")
        found[name] = column
    return MappingProxyType(found)


def column_named(name: str) -> Column | None:
    """Return the column of this name; None if no row and no installed package has it."""
    return COLUMNS.get(name) or attached_columns().get(name)


def known_column(name: str) -> Column:
    """Return the column of this name. Raises WireError without one."""
    if column := column_named(name):
        return column
    raise WireError(
        f"unknown column {name!r:.80}",
        hint="install the package that attaches it; known: "
        + ", ".join([*COLUMNS, *attached_columns()]),
    )


def large_columns() -> dict[str, LargeColumn]:
    return {column.name: column for column in all_columns() if isinstance(column, LargeColumn)}


def all_columns() -> Iterator[Column]:
    yield from COLUMNS.values()
    yield from attached_columns().values()


def parts_of(columns: Arrays, name: str) -> dict[str, Array]:
    """Return the arrays of a column by part."""
    if name in columns:
        return {"": columns[name]}
    start = f"{name}/"
    return {at[len(start) :]: array for at, array in columns.items() if at.startswith(start)}
