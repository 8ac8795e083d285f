"""How a response is sampled: lengths, stops, the seed, and what cuts the distribution."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace
from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Meta(ge=0)]


class StructuredOutput(BaseModel):
    """The form that a response is kept to while it is sampled: exactly one of the three keys.

    Logprobs are over the allowed tokens. An interrupted rollout starts again, because no engine can
    continue in the middle of a structure.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    json_schema: dict[str, Any] | None = None
    """the response is JSON of this schema"""
    regex: str | None = Field(None, min_length=1)
    """the whole response matches this regular expression"""
    choice: list[str] | None = Field(None, min_length=1)
    """the response is one of these texts"""

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutput:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("expected exactly one of json_schema, regex and choice")
        return self


ALWAYS_CUTS = ("top_p", "top_k", "min_p")
"""Settings that cut off tokens wherever one is sampled."""

CUTS = (*ALWAYS_CUTS, "min_tokens", "structured")
"""Settings that cut off tokens, and change no other: a sampling mask has the others."""

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


class SampleParams(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """How a response is sampled. Defaults are those of XTuner; 0 turns `top_k` off.

    Values are checked when a group is written and read, not here.
    """

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Count = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    max_tokens: Annotated[int, Meta(ge=1)] = 2048
    min_tokens: Count = 0
    stops: list[str] = []
    stop_token_ids: list[int] = []
    seed: int | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    structured: StructuredOutput | None = None

    def given(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in values.items() if value != _DEFAULTS[name]}

    def changes(self, *, masked: bool = False) -> str:
        """Return the settings that make the engine sample from another distribution; "" for none.

        The trainer computes logprobs of the model's own one, at the same temperature. `masked`: it
        knows which tokens could be sampled, and takes its softmax over these.
        """
        given = self.given()
        names = PENALTIES if masked else (*CUTS, *PENALTIES)
        return ", ".join(name for name in names if name in given)

    def always_cuts(self) -> str:
        """Return the settings because of which every token has a sampling mask; "" for none."""
        given = self.given()
        return ", ".join(name for name in ALWAYS_CUTS if name in given)

    def after(self, done: int) -> SampleParams:
        """Return the parameters after `done` tokens, with a new seed, which repeats no draws."""
        if not done:
            return self
        return replace(
            self,
            max_tokens=self.max_tokens - done,
            min_tokens=max(0, self.min_tokens - done),
            seed=None if self.seed is None else derived_seed(self.seed, done),
        )

    def attempt(self, number: int | str) -> SampleParams:
        """Return the parameters of a further response or turn, each number with its own seed.

        Or of a further conversation, by its name.
        """
        if not number or self.seed is None:
            return self
        return replace(self, seed=derived_seed(self.seed, "attempt", number))

    def within(self, tokens: int) -> SampleParams:
        if tokens >= self.max_tokens:
            return self
        return replace(self, max_tokens=tokens, min_tokens=min(self.min_tokens, tokens))


_DEFAULTS = asdict(SampleParams())


def derived_seed(*origin: object) -> int:
    """Return a seed that follows from these values: 31 bits, for engines with signed integers."""
    name = ":".join(map(str, origin))
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "little") >> 1
