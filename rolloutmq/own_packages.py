"""Load the packages that `rolloutmq` consists of, and not a file of the user's with such a name.

Python searches the folder of a script first, so a `consumer.py` or a `buffer/` there would be
imported in place of ours. Where the user's own file was imported before, both cannot work.
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


load()
