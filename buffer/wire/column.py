"""An optional column of a rollout: how it is checked, stored, padded and read, in one object."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from buffer.errors import ConfigError, WireError

Number = Real | np.bool_
"""To Python, a bool of numpy is not a number."""

Array = NDArray[Any]
Arrays = Mapping[str, Array]


class Rollout(Protocol):
    """What a column reads of a `RolloutState`."""

    prompt_ids: NDArray[np.int32] | None
    response_ids: NDArray[np.int32]
    columns: dict[str, Any]


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
    are absent. `resets`: new tokens discard the column; otherwise they get 0. `is_field`: of
    `RolloutState`; others are in its `columns`.
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
    is_field: bool = False

    is_large = False
    """whether it has megabytes: then judges and readers do not get it, and it may be in a file"""

    def __post_init__(self) -> None:
        if not self.is_large and not self.is_float and np.isnan(self.absent):
            raise ConfigError(f"the column {self.name} has integers, and no value for `absent`")

    @cached_property
    def is_float(self) -> bool:
        return np.dtype(self.dtype).kind == "f"

    def layout(self, part: str) -> Layout | None:
        """Return the layout of an array in documents; None if the column has no such part."""
        if bool(part) != self.named or len(part) > NAME_LENGTH:
            return None
        return Layout(np.dtype(self.dtype), 1 + self.inner, self.per, self.holds_ids)

    # -- in a rollout --------------------------------------------------------

    def get(self, state: Rollout) -> Any:
        """Return the value of a rollout: None, an array or number, or these by name."""
        return getattr(state, self.name) if self.is_field else state.columns.get(self.name)

    def set(self, state: Rollout, value: Any) -> None:
        if self.is_field:
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

    def problem(self, value: Any, state: Rollout) -> str:
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
                beside = getattr(state, name) if self.is_field else state.columns.get(name)
                other = self.parts(beside).get(part)
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
            lengths = [1] * len(values)
            found = [
                {part: np.asarray([own], self.dtype) for part, own in parts.items()}
                for parts in found
            ]
        names = sorted({part for own in found for part, array in own.items() if len(array)})
        return {
            self.at(part): self._joined(self.at(part), [own.get(part) for own in found], lengths)
            for part in names
        }

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

    def to_fields(self, value: Any) -> dict[str, Any]:
        """Return the fields that a line of an exported file has for a value, or for None."""
        return {self.name: value}

    def of_fields(self, *given: Any) -> Any:
        """Return the value of the fields of `to_fields`, in their order. Raises ValueError."""
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


def parts_of(columns: Arrays, name: str) -> dict[str, Array]:
    """Return the arrays of a column by part."""
    if name in columns:
        return {"": columns[name]}
    start = f"{name}/"
    return {at[len(start) :]: array for at, array in columns.items() if at.startswith(start)}
