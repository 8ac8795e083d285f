"""Decode tokens for people, with the tokenizer of a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from buffer.run import Run


class TokenTexts:
    """Decodes tokens with the first tokenizer that is found in `folders`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._files = [folder / "tokenizer.json" for folder in folders]

    @cached_property
    def _tokenizer(self) -> Any:
        file = next((path for path in self._files if path.is_file()), None)
        if file is None:
            return None
        try:
            from tokenizers import Tokenizer
        except ImportError:  # installed with an extra
            return None
        return Tokenizer.from_file(str(file))

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return [str(self._tokenizer.decode([token], skip_special_tokens=False)) for token in ids]

    def joined(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str | None:
        if self._tokenizer is None:
            return None
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


def model_folders(run: Run, run_dir: Path | None) -> list[Path]:
    newest = run.control.state().weights_path
    return [*([run_dir / "model"] if run_dir else []), *([Path(newest)] if newest else [])]
