"""The base class of every section of a config file."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from buffer.model.dotted_path import is_dotted_path


class Section(BaseModel):
    """A section that cannot be changed, refuses unknown keys and checks its defaults, too.

    The string under a field is its meaning in `docs/pages/config_reference.md` and in the JSON
    schema.

    Usage:

        class LaunchSection(Section):
            workers: int = Field(2, ge=1)
            \"""number of rollout workers\"""
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def _check_dotted_path(path: str) -> str:
    if not is_dotted_path(path):
        raise ValueError("expected package.module:function")
    return path


DottedPath = Annotated[str, AfterValidator(_check_dotted_path)]
"""The name of a function or class of the user, as package.module:function."""
