"""Processes that die between two calls of one operation, and others that go on from there (I3, I6,
I8, I12, I13).
"""

from __future__ import annotations

from buffer.ids import group_id, new_nonce
from buffer.manifest import NotReady
from buffer.wire import group_bytes
from buffer.wire.rollout import Status
from tests.buffer.histories.server_moves import ServerMoves
from tests.buffer.scene import extend, prompt


class CrashMoves(ServerMoves):
    def producer_dies_before_it_enqueues(self, task: str, number: int) -> None:
        """Its prompts are stored; the next producer draws the same ones."""
        cursor = self.tasks[task].cursor
        draws = [group_id(task, cursor + n) for n in range(number)]
        self.scene.run.payloads.write_prompts(
            {gid: prompt(gid, 1) for gid in draws if gid not in self.groups}
        )
        self.change_producer(is_left=False)

    def worker_dies_before_it_submits(self, worker: str, which: int) -> None:
        """Its result is stored, under a token that nobody will use again."""
        if not self.jobs[worker]:
            return
        job, _, is_owned = self.pick(worker, which)
        if is_owned:
            group = extend(self.begun(job), Status.COMPLETED, self.engines[worker])
            self.scene.run.payloads.write(job.gid, job.token, group_bytes.encode(group))
            self.jobs[worker].remove(job)

    def trainer_dies_in_its_commit(self, behind: int, keep: int, slices: int) -> None:
        """So many groups are archived, or (0) none; the next commit goes on."""
        if slices:
            self.commit(behind, keep, slices)
        self.restart_trainer(0)

    def trainer_dies_while_it_opens(self, back: int, slices: int, again: int) -> None:
        """So many groups are clamped; nobody is given a batch before the next trainer has opened."""
        nonce = new_nonce()
        lineage = f"t{next(self.lineages)}"
        step = max(self.keep, self.taken - back)
        with self.store.dying("rescore", slices):
            self.scene.run.trainers.open(nonce, step=step, lineage=lineage, take_over=True)
        self.forks.append((lineage, step))
        self.old_trainers.append(nonce)
        if self.store.has_died:
            answer = self.scene.run.ledger.take(nonce, self.taken + 1, {"math": 1}, strict=False)
            assert isinstance(answer, NotReady)
            assert answer.recovering
        self.reopen(max(self.keep, self.taken - again))
