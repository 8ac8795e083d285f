"""Load our own packages, even if a user's file has the name of one.

Python searches a script's folder first, and would import its `consumer.py` in place of ours.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

NAMES = ("buffer", "consumer", "producer_workers")
HOME = Path(__file__).resolve().parents[1]


def load() -> None:
    """Import our packages from the folder beside `rolloutmq`. Raises ImportError."""
    sys.path.insert(0, str(HOME))
    try:
        for name in NAMES:
            file = import_module(name).__file__
            if file is None or Path(file).resolve() != HOME / name / "__init__.py":
                raise ImportError(
                    f"{file} was imported as {name!r}, which is the name of a package "
                    "of rolloutmq: "
                    "rename that file",
                    name=name,
                )
    finally:
        sys.path.remove(str(HOME))


def search_current_folder_last() -> None:
    """Move the current folder, which `python -m` searches first, to the end of sys.path."""
    if not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))


load()
