"""A line of a script that enforces an invariant, and the story that fails without it.

A mutation names its text exactly: who changes such a line changes it here, too, and is reminded of
what it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from buffer.redis.scripts import Script, assemble, sources
from tests.buffer.scene import Scene

Story = Callable[[Scene], None]


@dataclass(frozen=True, slots=True)
class Mutation:
    """`old` becomes `new` ("": the line is gone) in one file under buffer/lua; then `story` must
    fail.
    """

    invariant: str
    file: str
    old: str
    story: Story
    new: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.invariant}-{self.file}-{self.story.__name__}"

    def scripts(self) -> Mapping[str, Script]:
        """All scripts, one of them (or what all share) mutated."""
        texts = sources()
        assert texts[self.file].count(self.old) == 1, (
            f"{self.file}.lua has no longer exactly one {self.old!r}"
        )
        texts[self.file] = texts[self.file].replace(self.old, self.new)
        return assemble(texts)
