"""The text of single tokens, for the colours of the rollout viewer, where a tokenizer of the run can be read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any


class TokenTexts:
    """`folders`: where a tokenizer may be, of the run's model or of any of its weights. Where none is, tokens are shown
    by their ids."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._files = [folder / "tokenizer.json" for folder in folders]

    @cached_property
    def _tokenizer(self) -> Any:
        file = next((path for path in self._files if path.is_file()), None)
        if file is None:
            return None
        try:
            from tokenizers import Tokenizer
        except ImportError:  # an extra; ids are shown
            return None
        return Tokenizer.from_file(str(file))

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """The text of each token by itself; None where nobody knows."""
        if self._tokenizer is None:
            return None
        return [str(self._tokenizer.decode([token], skip_special_tokens=False)) for token in ids]
