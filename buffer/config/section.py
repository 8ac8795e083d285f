"""The base class of every section of a config file."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from buffer.imports import is_dotted_path

YEAR_S = 31_536_000
"""Longest time that a key of a config accepts: far longer ones overflow the clocks of a process."""

FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Of a key that is a tuple: where packages attach keys, its section gets no JSON, but a list."""

Count = Annotated[int, Field(le=1_000_000_000)]
"""A number of things or steps; scripts and column types count no further than 2**31."""


class Section(BaseModel):
    """A section that cannot be changed, refuses unknown keys and checks its defaults, too.

    The string under a field is its meaning on the page of all keys (`meanings`).
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        # most processes use few sections
        defer_build=True,
    )

    def problems(self) -> Iterator[str]:
        """Yield violations of rules between keys of this section."""
        yield from ()

    def default_of(self, key: str) -> Any:
        """Return the default of a key, which may depend on the keys before it."""
        field = type(self).model_fields[key]
        return field.get_default(call_default_factory=True, validated_data=dict(self))

    def public(self) -> dict[str, Any]:
        """Return the values as JSON, without those that may be secret: they are in no repr."""
        secret = {name for name, field in type(self).model_fields.items() if not field.repr}
        values = self.model_dump(mode="json", exclude=secret)
        parts = {name: getattr(self, name) for name in values}
        return values | {n: part.public() for n, part in parts.items() if isinstance(part, Section)}

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        details = [
            InitErrorDetails(
                type=PydanticCustomError("problem", "{what}", {"what": problem}), input={}
            )
            for problem in self.problems()
        ]
        if details:
            raise ValidationError.from_exception_data("section", details)
        return self


def _check_dotted_path(path: str) -> str:
    if not is_dotted_path(path):
        raise ValueError("expected package.module:function")
    return path


DottedPath = Annotated[str, AfterValidator(_check_dotted_path)]
"""The name of a function or class of the user, as package.module:function."""


@cache
def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the meaning of each field, on one line; "" where no string is under it.

    pydantic would read them at every import, which takes a tenth of the start of each process.
    """
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            (tree,) = ast.parse(dedent(inspect.getsource(kind))).body
            for statement, below in pairwise([*ast.iter_child_nodes(tree), ast.Pass()]):
                match statement, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                        found[name] = " ".join(text.split())
                    case ast.AnnAssign(target=ast.Name(id=name)), _:
                        found[name] = ""
    return {name: found.get(name, "") for name in model.model_fields}
