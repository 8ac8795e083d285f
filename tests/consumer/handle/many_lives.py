"""A trainer that dies at random lines, again and again, while disk and server lose what they may.

usage: python -m tests.consumer.handle.many_lives FOLDER MODEL SEED LIVES [RANKS]
Forks, from one warm process, a crew and a trainer for each life; in turns they publish from memory
and by folder. RANKS, such as 2,1,4, are the numbers of ranks of the first lives; later ones are
drawn of them. SIGKILL ends one rank at a line of the files that take, train, write a checkpoint,
commit and publish; then the server is killed as well. Between two lives, at random, the server is
reset to the end of the life before, the newest checkpoint is lost, or all of them are. Prints a
line for each life, and in the end {"deaths": …, "lines": …, "moved": …, "differs": …}: how far the
checkpoint is from a learner that trained the same batches and never died.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import torch

import consumer
from buffer.errors import LedgerError, LostRun
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.run.open import wait_for_run
from buffer.run.run import Run
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from consumer.grpo.learner.advantages import grpo_advantages
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.model_state.saved_state import SavedState
from consumer.grpo.policy.policy import Policy
from consumer.grpo.trainer import Trainer
from consumer.grpo.trainer_rank import TrainerRank
from consumer.handle.batch import Batch
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.ranks import join
from consumer.handle.step_log import StepLog
from rolloutmq.config.config import Config
from rolloutmq.launch.child import rank_environments
from rolloutmq.launch.create import create_run
from tests.consumer.grpo.models.tiny import train_step
from tests.consumer.grpo.training_config import GROUPS, training_config
from tests.consumer.handle.crew import Crew

STEPS = 6
LINES = 1500
"""A life ends at one of these lines; a whole run has 2300."""
RANK_LINES = (3000, 1000)
"""The same of several ranks, for rank 0 and for each other: a whole run has 4400 and 1100."""
NOTICE_S = 120.0
"""In which the other ranks must end when one has died."""
REFUSED = 7
CHANGED = 99
"""Exit codes: the server has freed or lost what this trainer needs; a batch that came again was
another one.
"""

PACKAGES = Path(consumer.__file__).parents[1]
FILES = {
    str(PACKAGES / name)
    for name in (
        "consumer/grpo/trainer.py", "consumer/grpo/trainer_rank.py",
        "consumer/grpo/model_state/saved_state.py", "consumer/handle/sharded_consumer.py",
        "consumer/handle/ranks.py", "consumer/handle/reader.py", "consumer/handle/checkpoint.py",
        "consumer/handle/step_log.py", "consumer/grpo/models/model_folder.py",
        "consumer/handle/rollout_consumer.py", "consumer/handle/taker.py",
        "consumer/handle/publication.py", "consumer/grpo/model_state/weights_folder.py",
        "consumer/grpo/model_state/weights_folder.py", "buffer/weights/checksums.py",
        "buffer/weights/new_folder.py", "buffer/weights/shared_folder.py",
        "buffer/weights/redis_chunks.py", "buffer/ledger/ledger.py",
        "buffer/ledger/trainer_opening.py", "buffer/ledger/from_checkpoint.py",
        "buffer/ledger/position.py",
    )
}  # fmt: skip


class Lives:
    """A run of `folder`, and all that happens to it."""

    def __init__(self, folder: Path, model: Path, seed: int, lives: int, ranks: list[int]) -> None:
        self.folder = folder
        self.model = model
        self.draw = random.Random(seed)
        self.lives = lives
        self.ranks = ranks
        self.server = EmbeddedServer(folder / "server")
        self.deliveries = folder / "deliveries"
        self.deliveries.mkdir(parents=True)
        self.config = make_config(folder, model, "folder")
        self.checkpoints = CheckpointFolder(self.config.run.folder / "checkpoints")
        self.lines: list[str] = []

    def run(self) -> None:
        """Lives until one comes to its end; for the last of them no death is appointed."""
        regenerate = False
        number = 0
        code = -1
        while code:
            number += 1
            self.server.start()
            crew = fork(self.serve)
            size = (
                self.ranks[number - 1]
                if number <= len(self.ranks)
                else self.draw.choice(self.ranks)
            )
            victim = self.draw.randrange(size)
            at = self.draw.randint(1, LINES if size == 1 else RANK_LINES[min(victim, 1)])
            self.config = make_config(self.folder, self.model, "redis" if number % 2 else "folder")
            fates = {victim: at if number < self.lives else 0}
            code = self.live(size, fates, regenerate)
            os.kill(crew, signal.SIGKILL)
            wait_for(crew)
            self.server.kill()
            regenerate = code == REFUSED
            fault = self.lose() if code == -signal.SIGKILL else "nothing"
            say(
                {
                    "life": number, "ranks": size, "victim": victim, "died": self.place(),
                    "code": code, "lost": fault, "left": self.checkpoints.steps(),
                }
            )  # fmt: skip
            if code not in (0, REFUSED, -signal.SIGKILL):
                raise SystemExit(f"life {number} ended with {code}")

    # -- the processes -------------------------------------------------------------------

    def serve(self) -> None:
        crew = Crew(wait_for_run(Store(self.server.url), "lives"), {"math": 40 * GROUPS}, stamp=0)
        crew.register()
        crew.serve()

    def live(self, size: int, fates: dict[int, int], regenerate: bool) -> int:
        """Run all ranks, of which some die at a line, until the last has ended."""
        environments = rank_environments(size)
        ranks = [
            fork(partial(self.train, environments[rank], fates.get(rank, 0), regenerate))
            for rank in range(size)
        ]
        codes = wait_for_all(ranks)
        if any(code not in (0, 1, REFUSED, -signal.SIGKILL) for code in codes):
            raise SystemExit(f"the ranks ended with {codes}")
        return -signal.SIGKILL if -signal.SIGKILL in codes else codes[0]

    def train(self, environment: dict[str, str], at: int, regenerate: bool) -> None:
        os.environ.update(environment)
        self.note_groups()
        store = Store(self.server.url)
        is_first = environment.get("RANK", "0") == "0"
        run = (
            create_run(store, self.config, self.model) if is_first else wait_for_run(store, "lives")
        )
        ranks = join()
        if at:
            trace = dying_at(at, self.folder / "place")
            sys.settrace(trace)
            threading.settrace(trace)  # weights are published by another thread
        if ranks.rank:
            TrainerRank(run, self.config, self.model, ranks).follow()
            return
        trainer = Trainer(run, self.config, self.model, ranks)
        trainer.consumer.take_batch = self.noting(trainer.consumer.take_batch)  # type: ignore[method-assign]
        try:
            trainer.fit(take_over=True, regenerate=regenerate)
        except (LedgerError, LostRun) as error:
            sys.stderr.write(f"refused: {error}\n")
            os._exit(REFUSED)

    def noting(self, take: Callable[..., Batch]) -> Callable[..., Batch]:
        """Record every batch; a step that is delivered again must be the same."""

        def noted(step: int, *args: Any, **more: Any) -> Batch:
            batch = take(step, *args, **more)
            self.note(f"step-{step}", "\n".join(batch.manifest.gids).encode())
            return batch

        return noted

    def note_groups(self) -> None:
        """Record the groups that each rank trains; those that come again must be the same."""
        fit = TrainController.fit

        def noted(controller: TrainController, groups: Sequence[RolloutGroup]) -> dict[str, float]:
            for group in groups:
                self.note(group.gid, group_bytes.encode(group))
            return fit(controller, groups)

        TrainController.fit = noted  # type: ignore[method-assign,assignment]

    def note(self, name: str, data: bytes) -> None:
        file = self.deliveries / name
        if file.exists() and file.read_bytes() != data:
            sys.stderr.write(f"{name} was {file.read_bytes()!r:.300} and is {data!r:.300}\n")
            os._exit(CHANGED)
        file.with_suffix(".tmp").write_bytes(data)
        file.with_suffix(".tmp").rename(file)

    def place(self) -> str:
        file = self.folder / "place"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        file.unlink(missing_ok=True)
        self.lines += [text] if text else []
        return text

    # -- what is lost --------------------------------------------------------------------

    def lose(self) -> str:
        """Cause one of the faults while the server is down.

        What may differ afterwards is no longer compared.
        """
        fault = self.draw.choice(
            ["nothing", "nothing", "second", "checkpoint", "both", "all checkpoints"]
        )
        past = self.folder / "server.past"
        steps = self.checkpoints.steps()
        if fault in ("second", "both") and past.exists():
            shutil.rmtree(self.server.folder)
            copy(past, self.server.folder)
        if fault in ("checkpoint", "both") and len(steps) > 1:
            shutil.rmtree(self.checkpoints.path(steps[-1]))
        if fault == "all checkpoints":
            shutil.rmtree(self.checkpoints.folder, ignore_errors=True)
        if fault in ("second", "both", "all checkpoints"):
            self.forget((self.checkpoints.steps() or [0])[0])
        shutil.rmtree(past, ignore_errors=True)
        copy(self.server.folder, past)
        return fault

    def forget(self, step: int) -> None:
        """Forget the batches behind the oldest checkpoint: they may be made of other groups."""
        for file in self.deliveries.glob("step-*"):
            if int(file.name.removeprefix("step-")) > step:
                file.unlink()

    # -- judging -------------------------------------------------------------------------

    def judge(self) -> None:
        log = StepLog(self.config.run.folder / "steps.jsonl")
        log.read_new()
        assert [step.step for step in log.steps] == list(range(1, STEPS + 1))
        assert log.trained_twice() == {}
        self.server.start()
        store = Store(self.server.url)
        run = Run.open(store, "lives")
        run.janitor.sweep()
        audit = run.account.fsck()
        trained = int(run.progress("math")["archived"])
        store.close()
        self.server.kill()
        assert audit.clean, audit.faults
        assert trained == self.checkpoints.steps()[0] * GROUPS, trained
        say({"deaths": len(self.lines), "lines": sorted(set(self.lines))} | self.replay(log))

    def replay(self, log: StepLog) -> dict[str, float]:
        policy = Policy(self.model, self.config.learner, device="cpu", seed=self.config.run.seed)
        learner = TrainController(policy)
        first = {name: tensor.clone() for name, tensor in learner.state_tensors().items()}
        for step in log.steps:
            groups = [group_bytes.decode((self.deliveries / gid).read_bytes()) for gid in step.gids]
            train_step(learner, groups, grpo_advantages([group.scores for group in groups]))
        last = SavedState(self.checkpoints.path(STEPS))
        wanted = learner.state_tensors()
        assert last.keys() == wanted.keys()
        weights = [name for name in wanted if name.startswith(("model/", "optimizer/"))]
        return {
            "differs": max(
                float((last[n].double() - wanted[n].double()).abs().max()) for n in weights
            ),
            "moved": max(float((first[n] - wanted[n]).abs().max()) for n in weights if n in first),
        }


def make_config(folder: Path, model: Path, transport: str) -> Config:
    return training_config(
        "lives",
        folder / "run",
        plan={"steps": STEPS},
        policy={"model": model, "max_staleness": 1000, "weights_transport": transport},
        lease={"lease_ms": 2000, "heartbeat_ms": 100},
        trainer={"keep_checkpoints": 2},
        learner={"warmup_steps": 2, "decay_steps": 5},
    )


def dying_at(line: int, note: Path) -> Any:
    """For `sys.settrace`: SIGKILL before the `line`-th line of FILES that any thread comes to."""
    seen = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == line:
                name = Path(frame.f_code.co_filename).name
                note.write_text(f"{name}:{frame.f_lineno} {frame.f_code.co_name}", encoding="utf-8")
                os.kill(os.getpid(), signal.SIGKILL)
        return count

    return lambda frame, event, arg: count if frame.f_code.co_filename in FILES else None


def copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.sock"))


def fork(work: Callable[[], None]) -> int:
    """Run a function in a child process that ends without any clean-up."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def wait_for_all(children: list[int]) -> list[int]:
    """Return how the processes ended; once one has, the others must end by themselves."""
    ends: dict[int, int] = {}
    give_up = float("inf")
    while len(ends) < len(children):
        for child in children:
            if child not in ends:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    ends[child] = os.waitstatus_to_exitcode(status)
                    give_up = min(give_up, time.monotonic() + NOTICE_S)
        if time.monotonic() > give_up:
            raise SystemExit(f"some ranks did not notice the end of others: {ends} of {children}")
        time.sleep(0.01)
    return [ends[child] for child in children]


def wait_for(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def say(line: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(line).decode() + "\n")
    sys.stdout.flush()


def main(folder: Path, model: Path, seed: int, number: int, ranks: Sequence[int]) -> None:
    torch.set_num_threads(1)
    lives = Lives(folder, model, seed, number, list(ranks))
    try:
        lives.run()
        lives.judge()
    finally:
        lives.server.kill()


if __name__ == "__main__":
    sizes = [int(size) for size in (sys.argv[5] if len(sys.argv) > 5 else "1").split(",")]
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sizes)
