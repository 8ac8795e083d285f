"""The config section [retention], which both sides share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from buffer.config.loader import Section


class RetentionSection(Section):
    """[retention]: what is kept of batches that are trained and committed."""

    policy: Literal["none", "last", "export"] = "none"
    """none: they are freed at once; last: the last `batches` of them stay readable; export: each stays until an
    exporter has said that it copied it, and the last `batches` of them after that"""
    batches: int = Field(0, ge=0)
    """archived batches that stay, with their bytes: they count against the server's memory"""

    @model_validator(mode="after")
    def _check_batches(self) -> RetentionSection:
        if self.policy == "last" and not self.batches:
            raise ValueError('policy = "last" needs batches = N, of at least 1')
        if self.policy == "none" and self.batches:
            raise ValueError('batches is only used by policy = "last" or "export"')
        return self
