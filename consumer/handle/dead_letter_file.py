"""`dead_letters.jsonl` in the run's folder: the newest dead letters, readable without the server.

The trainer's process owns it and writes it again, whole, whenever the letters have changed: it is
bounded, never torn, and has no letter that was requeued or dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import orjson
from pydantic import TypeAdapter, ValidationError

from buffer.errors import ConfigError, RolloutMQError
from buffer.groups.dead_letters import DeadLetter
from buffer.ids import split_group_id
from buffer.redis.retry import LogOnce
from buffer.redis.whole_file import replace_file
from buffer.run.run import Run

log = logging.getLogger("rolloutmq.trainer")

FILE = "dead_letters.jsonl"
EVERY_S = 10.0


@contextmanager
def kept_dead_letters(run: Run, folder: Path) -> Iterator[None]:
    """Keep the file as the server's dead letters are, during this block and at its end."""
    is_over = threading.Event()
    keeper = threading.Thread(
        target=_keep, args=(run, folder, is_over), name="dead letters", daemon=True
    )
    keeper.start()
    try:
        yield
    finally:
        is_over.set()
        keeper.join(5.0)  # for the last look, where the server may be gone


def _keep(run: Run, folder: Path, is_over: threading.Event) -> None:
    problem = LogOnce(log, f"dead letters are not kept in {folder}", ended="dead letters are kept")
    written = None
    is_last = False
    while not is_last:
        is_last = is_over.wait(EVERY_S)
        try:
            # their reasons are bounded
            letters = list(islice(run.dead_letters.newest(), 500))
            known = [(letter.gid, letter.tries, letter.reason) for letter in letters]
            if known != written and (known or (folder / FILE).exists()):
                write_dead_letters(folder, letters)
                written = known
            problem.report("")
        except (RolloutMQError, OSError) as error:  # it tries again, and training continues
            problem.report(type(error).__name__, str(error))


def write_dead_letters(folder: Path, letters: list[DeadLetter]) -> None:
    now_ms = round(1000 * time.time())
    lines = [orjson.dumps(replace(letter, age_ms=now_ms - letter.age_ms)) for letter in letters]
    replace_file(folder / FILE, b"".join(line + b"\n" for line in lines), is_private=True)


def read_dead_letters(folder: Path) -> list[DeadLetter]:
    """Return the letters that were kept, newest first; their ages are by this machine's clock.

    Lines that cannot be read are left out, and logged.
    """
    file = folder / FILE
    parsed = TypeAdapter(DeadLetter)  # ignores what another version may have written besides
    now_ms = round(1000 * time.time())
    kept = []
    for number, line in enumerate(file.read_bytes().splitlines() if file.is_file() else [], 1):
        try:
            letter = parsed.validate_json(line)
            split_group_id(letter.gid)
        except (ValidationError, ConfigError) as error:
            log.warning("line %s of %s is left out: %s", number, file, error)
            continue
        # its responses are only on the server
        age_ms = max(0, now_ms - letter.age_ms)
        kept.append(replace(letter, age_ms=age_ms, has_responses=False))
    return kept
