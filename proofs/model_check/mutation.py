"""Lines of the scripts that enforce an invariant, in `mutations.jsonl`, each gone or changed.

A mutation names its text exactly: whoever changes such a line changes it there, too, and is reminded
of what it is for. Two proofs must notice it: the `story` of tests/buffer/invariants must fail, and a
`chaos` run with that build must be judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from buffer.redis.scripts import Script, assemble, sources

FILE = Path(__file__).with_name("mutations.jsonl")


@dataclass(slots=True)
class Mutation:
    """`old` becomes `new` ("": the text is gone) in one file under buffer/lua."""

    invariant: str
    file: str
    old: str
    new: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict)
    story: str = ""
    chaos: str = ""

    def __str__(self) -> str:
        texts = (" ".join(text.split()) for text in (self.old, self.new) if text)
        limits = [str(dict(self.limits))] if self.limits else []
        return " | ".join([self.invariant, self.file, *texts, *limits])

    def scripts(self) -> Mapping[str, Script]:
        """All scripts, one of them (or what all share) mutated."""
        texts = sources()
        found = texts[self.file].count(self.old)
        assert found == 1, f"{self.file}.lua has {found} times {self.old!r}, not once"
        texts[self.file] = texts[self.file].replace(self.old, self.new)
        return assemble(texts)


def read_mutations() -> list[Mutation]:
    return [Mutation(**orjson.loads(line)) for line in FILE.read_bytes().splitlines()]
