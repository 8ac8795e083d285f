"""The text of single tokens, for the colours of the rollout viewer, where the run's folder has a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

PLACES = ("model/tokenizer.json", "tokenizer.json")


class TokenTexts:
    """`run_dir`: the run's folder, None where it is not known: tokens are then shown by their ids."""

    def __init__(self, run_dir: Path | None) -> None:
        self._files = [run_dir / place for place in PLACES] if run_dir else []

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
