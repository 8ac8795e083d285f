"""What people wrote about a run, in `note.json` of its folder: a text, and tags to find it by."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from buffer.errors import ConfigError
from buffer.redis.whole_file import replace_file

FILE = "note.json"


class RunNote(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str = Field("", max_length=4000)
    tags: tuple[Annotated[str, Field(pattern=r"^[\w.:/+-]{1,40}$")], ...] = Field((), max_length=16)
    written_ms: int = 0
    """milliseconds since 1970; 0: nobody wrote anything"""


def read_note(folder: Path) -> RunNote:
    """Return the note of a run; an empty one where the folder has none that can be read."""
    try:
        return RunNote.model_validate_json((folder / FILE).read_bytes())
    except (OSError, ValidationError):
        return RunNote()


def write_note(folder: Path, text: str, tags: str, seen_ms: int) -> RunNote:
    """Replace the note; `tags`: with spaces between them.

    `seen_ms`: `written_ms` of the note that the writer has read. Raises ConfigError where another
    one was written since, or a value is too long.
    """
    if read_note(folder).written_ms != seen_ms:
        raise ConfigError("somebody else has changed the note", hint="read it, then write again")
    now_ms = time.time_ns() // 1_000_000
    try:
        note = RunNote(text=text, tags=tuple(dict.fromkeys(tags.split())), written_ms=now_ms)
    except ValidationError as error:
        what = "; ".join(each["msg"] for each in error.errors())
        hint = "4,000 characters, and 16 tags of 40 letters, digits and .:/+-_ at most"
        raise ConfigError(f"the note was not written: {what[:300]}", hint=hint) from None
    replace_file(folder / FILE, note.model_dump_json().encode())
    return note
