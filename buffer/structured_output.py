"""What a response must look like, where the engine can keep the sampling to it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class StructuredOutput(BaseModel):
    """One of: a JSON schema, a regular expression of the whole response, some texts of which it is one.

    Logprobs are those of the tokens that were allowed. A rollout that is interrupted starts again: no engine can go on
    in the middle of a structure.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    json_schema: dict[str, Any] | None = Field(None, description="the response is JSON of this schema")
    regex: str | None = Field(None, min_length=1, description="of the whole response")
    choice: list[str] | None = Field(None, min_length=1, description="the response is one of these")

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutput:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("structured output is one of json_schema, regex and choice")
        return self
