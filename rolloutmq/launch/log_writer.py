"""Write what a process of a run prints into a log of bounded size; started as a program of its own.

    process and its children ──pipe──▶ this ──▶ NAME.log, and what was before: NAME.log.1

It ends with the last process that can still print, also after `rolloutmq run` was killed. A process
that prints faster than this writes is slowed down. What the disk does not take is left out, and
counted.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def main(log: Path, most: int) -> None:
    """Copy stdin to the file `log`; before it has more than `most` bytes, begin it anew."""
    lost, why = 0, ""
    while piece := os.read(0, 1 << 16):  # smaller than every limit
        note = f"\n{lost} bytes were not logged: {why}\n".encode() if lost else b""
        try:
            with log.open("ab") as file:
                if file.tell() + len(note) + len(piece) > most:
                    shutil.copyfile(log, log.with_name(log.name + ".1"))
                    file.truncate(0)
                file.write(note + piece)
            lost = 0
        except OSError as error:  # the disk is full, or the folder is gone
            lost, why = lost + len(piece), str(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
