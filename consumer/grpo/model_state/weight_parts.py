"""The parts of published weights, written by a thread of each rank while all of them train.

rank 0                                  each other rank
posts the folder                        finds it, and writes its part into it
writes its own part                     posts the checksums, or what went wrong
waits for the others

Threads use no collective, which would mix with those of training. If a rank dies, the next exchange
of all ranks (`TrainerRank.meet`) ends them all.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from buffer.errors import PublicationFailed, RankLost
from buffer.weights.checksums import FileChecksums, WrittenFiles
from consumer.grpo.model_state.weights_folder import WeightsSnapshot
from consumer.handle.ranks import Ranks

POLL_S = 0.02


class WeightParts:
    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._thread = ThreadPoolExecutor(1, "weight-parts")
        self._ended = threading.Event()
        self._number = 0
        self._attempt = 0
        self._snapshot: WeightsSnapshot | None = None

    def begin(self, snapshot: WeightsSnapshot) -> None:
        self._ended.set()  # of the last one
        self._ended = threading.Event()
        self._snapshot = snapshot
        self._number += 1
        self._attempt = 0
        if self._ranks.rank:
            self._thread.submit(self._follow, snapshot, self._number, self._ended)

    def write(self, folder: Path) -> WrittenFiles:
        """Write all parts into `folder`; return their checksums. Raises PublicationFailed."""
        assert self._snapshot
        ranks = self._ranks
        self._attempt += 1
        names = [_name(self._number, self._attempt, rank) for rank in range(ranks.size)]
        if ranks.size > 1:
            ranks.post(names[0], str(folder))
        own = self._write_own(self._snapshot, folder)
        parts = [own, *(self._await(name) for name in names[1:])]
        if problems := [str(part["problem"]) for part in parts if part["problem"]]:
            raise PublicationFailed("; ".join(problems), hint="is the disk full?")
        files = [item for part in parts for item in part["files"].items()]
        return WrittenFiles((name, FileChecksums.parse(facts)) for name, facts in files)

    def close(self) -> None:
        self._ended.set()
        self._thread.shutdown()

    def _follow(self, snapshot: WeightsSnapshot, number: int, ended: threading.Event) -> None:
        attempt = 1
        while not ended.wait(POLL_S):
            folder = self._ranks.posted(_name(number, attempt, 0))
            if folder:
                own = self._write_own(snapshot, Path(folder))
                self._ranks.post(_name(number, attempt, self._ranks.rank), own)
                attempt += 1

    def _write_own(self, snapshot: WeightsSnapshot, folder: Path) -> dict[str, Any]:
        problem = ""
        facts = WrittenFiles()
        try:
            facts = snapshot.write(folder)
        except Exception as error:  # rank 0, which waits for this part, raises it
            problem = f"rank {self._ranks.rank} cannot write its part of the weights: {error!r}"
        return {"problem": problem, "files": {n: each.to_json() for n, each in facts.items()}}

    def _await(self, name: str) -> dict[str, Any]:
        while not self._ended.wait(POLL_S):
            part: dict[str, Any] | None = self._ranks.posted(name)
            if part:
                return part
        raise RankLost("the trainer ended before all ranks had written their part of the weights")


def _name(number: int, attempt: int, rank: int) -> str:
    return f"weights/{number}/{attempt}/{rank}"
