"""Find where in a user's code an error was raised."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_OURS = tuple(
    f"{_ROOT / name}/" for name in ("buffer", "consumer", "producer_workers", "rolloutmq")
)
_LIBRARIES = (sys.prefix, sys.base_prefix, "<")
_MOST = 8


def user_frames(error: BaseException) -> list[str]:
    """Return the places ("file:line in function") in a user's code, the innermost last.

    Without any, return places in libraries, which a user's code may be, unless code of this project
    raised the error and called no code of a user.
    """
    found = traceback.extract_tb(error.__traceback__)
    others = [each for each in found if not each.filename.startswith(_OURS)]
    users = [each for each in others if not each.filename.startswith(_LIBRARIES)]
    if not users and found and found[-1].filename.startswith(_OURS):
        return []
    return [f"{each.filename}:{each.lineno} in {each.name}" for each in (users or others)[-_MOST:]]
