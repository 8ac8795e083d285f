"""A run and a model of it, and every move that anybody can make. One class of moves for each actor;
another actor is another file, one more base of `AllMoves`, and its moves in
`tests/buffer/histories/test_histories.py`.
"""

from __future__ import annotations

from tests.buffer.histories.crash_moves import CrashMoves
from tests.buffer.histories.folder_moves import FolderMoves
from tests.buffer.histories.janitor_moves import JanitorMoves
from tests.buffer.histories.operator_moves import OperatorMoves


class AllMoves(FolderMoves, CrashMoves, JanitorMoves, OperatorMoves):
    def produce(self, worker: str, task: str, number: int) -> None:
        """What most runs do most of the time: prompts in, results out."""
        self.enqueue(task, [1] * number, ahead=20)
        self.load_weights(worker)
        self.claim(worker, number)
        for _ in [job for job in self.jobs[worker] if self.owns(job)]:
            self.submit(worker, 1, "completed")

    def train(self, math: int, code: int) -> None:
        """One good step."""
        self.take(math, code, strict=False)
        self.publish()
        self.commit(0, 2)

    def acknowledge_a_pause(self, worker: str) -> None:
        """While something is still held, if anything waits."""
        self.hold(worker)
        self.pause("operator", "abort", "")
        self.acknowledge(worker)
        self.pause("operator", "run", "")

    def server_forgets_its_scripts(self) -> None:
        self.scene.raw.script_flush()
