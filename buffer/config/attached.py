"""Keys and kinds of sections that packages attach by an entry point, so that nothing names them.

    [project.entry-points."rolloutmq.judges"]
    my_key = "my_package.my_module:MySection"

adds the key `my_key` to every section that attaches the group `rolloutmq.judges`. The object is the
type of its value, which pydantic can check. `AttachedKinds` adds kinds of one section.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple, Union

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError

from buffer.config.assignments import to_strict_json
from buffer.config.section import Section
from buffer.imports import attached, load_object


class AttachedSection(Section):
    """A section of a config under the name of an entry point of the group `rolloutmq.sections`."""

    def rules(self, config: Any) -> Iterator[str]:
        """Yield where it contradicts another section of the config."""
        yield from ()

    def warnings(self) -> Iterator[str]:
        yield from ()

    def check(self) -> None:
        """Raise ConfigError for what this machine lacks, before a worker starts."""


@cache
def attached_types(group: str) -> Mapping[str, TypeAdapter[Any]]:
    """Return the types of all keys of a group. Raises ConfigError where one cannot be imported."""
    return {
        key: TypeAdapter(load_object(value, kind=group)) for key, value in attached(group).items()
    }


@dataclass(frozen=True)
class AttachedKinds:
    """Annotates the base class of a section: a value is one of `own`, or of an attached kind.

    The field `kind` of a section tells which. Raises ConfigError, once a config is read, for an
    attached kind that cannot be imported.
    """

    group: str
    own: tuple[type[Section], ...]

    def __get_pydantic_core_schema__(self, base: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        others = [load_object(spec, kind=self.group) for spec in attached(self.group).values()]
        kinds: Any = Union[(*self.own, *others)]
        return handler.generate_schema(Annotated[kinds, Field(discriminator="kind")])


class _Further(NamedTuple):
    """The value of a key that is no field."""

    group: str
    key: str
    value: Any


def _check(further: Any) -> Any:
    group, key, value = further
    if key not in attached(group):
        raise PydanticKnownError("extra_forbidden")
    # through JSON, as the rest of a config
    return attached_types(group)[key].validate_json(to_strict_json(value), strict=True)


class Attaching(Section, extra="allow"):
    """A section that also has a key for each entry point of the group `attaches`."""

    attaches: ClassVar[str]

    __pydantic_extra__: dict[str, Annotated[Any, BeforeValidator(_check)]]

    @property
    def attached(self) -> Mapping[str, Any]:
        """Return the values of attached keys that the config sets."""
        return self.model_extra or {}

    @model_validator(mode="before")
    @classmethod
    def _name_further_keys(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {
            key: value if key in cls.model_fields else _Further(cls.attaches, key, value)
            for key, value in values.items()
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        own = handler.resolve_ref_schema(schema)
        own["additionalProperties"] = False
        for key, adapter in attached_types(cls.attaches).items():
            own["properties"][key] = handler(adapter.core_schema)
        return schema
