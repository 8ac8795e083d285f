"""Servers that lose their last second, their last minutes, or everything; trainers that die while
they put it right.

A real Redis with `appendfsync everysec` is killed, and its append-only file is cut at some byte:
what a crash in the wrong moment does. The judge looks at the batches that led to the last
checkpoint: every group once, and none too old.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from buffer.errors import LedgerError, LostRun
from buffer.ids import new_nonce
from buffer.ledger.position import Position
from buffer.ledger.trainer_opening import Opening
from buffer.limits import RunLimits, TaskLimits
from buffer.manifest import Manifest
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.rollout import PolicyVersion
from buffer.wire.staleness import staleness
from consumer.handle.rollout_consumer import RolloutConsumer
from tests.consumer.conftest import die
from tests.consumer.handle.crew import at_work
from tests.servers import start_redis

EVERYSEC = (
    "--appendonly", "yes", "--appendfsync", "everysec", "--save", "",
    "--auto-aof-rewrite-percentage", "0",
)  # fmt: skip
LIMITS = RunLimits(
    lease_ms=2000,
    heartbeat_ms=100,
    role_timeout_ms=60_000,
    stale_threshold=6,
    tasks={"math": TaskLimits()},
)
GROUPS = 3
STEPS = 4
KEPT = 2
ROOT = Path(__file__).parents[2]


@dataclass
class Checkpoint:
    """What is on the trainer's disk: its position as JSON, and the batches that made its weights
    (for the judge).
    """

    position: str
    history: list[Manifest] = field(default_factory=list)


class Site:
    """One run over many lives of its server and its trainer."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.nonce = new_nonce()
        self.random = random.Random(seed)
        self.checkpoints = [Checkpoint(Position().model_dump_json())]
        self.aof_bytes: list[int] = []

    @property
    def aof(self) -> Path:
        return next(self.folder.glob("server/appendonlydir/*.incr.aof"))

    def life(self, older: int = 0, *, regenerate: bool = False, steps: int = STEPS) -> Opening:
        """Server and trainer start, some steps are trained and every second one saved; then both
        are killed.
        """
        with start_redis(self.folder / "server", *EVERYSEC) as url:
            run = self.connect(url)
            consumer = RolloutConsumer(run)
            checkpoint = self.checkpoints[-1 - older]
            self.checkpoints = self.checkpoints[: len(self.checkpoints) - older]
            position = Position.model_validate_json(checkpoint.position)
            try:
                opening = consumer.open(position=position, take_over=True, regenerate=regenerate)
                assert run.account.fsck().clean
                with at_work(run, math=1000):
                    self.train(run, consumer, position, list(checkpoint.history), steps)
                self.judge(run)
                # a server whose disk is slow keeps what it has yet to write: only `cut` may lose it
                while run.store.client.info("persistence")["aof_buffer_length"]:
                    time.sleep(0.02)
            finally:
                die(consumer)
                run.store.close()
        return opening

    def connect(self, url: str) -> Run:
        return Run.create(
            Store(url, deadline_s=400.0),
            "demo",
            self.nonce,
            LIMITS,
            PolicyVersion("initial", 0),
            "/w",
        )

    def train(
        self,
        run: Run,
        consumer: RolloutConsumer,
        position: Position,
        history: list[Manifest],
        steps: int,
    ) -> None:
        for _ in range(steps):
            weights = PolicyVersion(consumer.lineage, position.step)
            run.control.publish_weights(consumer.nonce, weights, "/w", "")
            batch = consumer.take_batch(position.step + 1, {"math": GROUPS}, deadline_s=400.0)
            position.add(batch.manifest)
            history.append(batch.manifest)
            self.aof_bytes.append(self.aof.stat().st_size)
            if position.step % 2 == 0:
                self.save(run, consumer, position, history)

    def save(
        self, run: Run, consumer: RolloutConsumer, position: Position, history: list[Manifest]
    ) -> None:
        steps = [Position.model_validate_json(saved.position).step for saved in self.checkpoints]
        keep = [*steps, position.step][-KEPT:][0]
        position.forget(keep)
        position.cursors = {"math": run.jobs.cursor("math")}
        self.checkpoints = [
            *self.checkpoints,
            Checkpoint(position.model_dump_json(), list(history)),
        ][-KEPT:]
        consumer.commit(position.step, keep=keep)

    def judge(self, run: Run) -> None:
        """Every group at most once, none too old, all that was committed is archived, and the
        account adds up.
        """
        audit = run.account.fsck()
        saved = self.checkpoints[-1]
        assert audit.clean, (audit.faults, audit.lost, audit.doubled)
        position = Position.model_validate_json(saved.position)
        assert [manifest.step for manifest in saved.history] == list(range(1, position.step + 1))
        trained = [gid for manifest in saved.history for gid in manifest.gids]
        assert len(trained) == len(set(trained)) == GROUPS * position.step
        assert all(gid in position.trained for gid in trained)
        freed = run.ledger.steps()[2]
        archived = {
            gid for manifest in saved.history if manifest.step <= freed for gid in manifest.gids
        }
        assert audit.tasks[0].archived == len(archived)
        for manifest in saved.history:
            ages = [
                staleness(manifest.step, entry.version)
                for entry in manifest.entries
                if entry.version is not None
            ]
            assert max(ages) < LIMITS.stale_threshold

    def cut(self, steps_ago: int) -> None:
        """The server's file ends about where it did so many takes ago, between two scripts."""
        size = self.aof_bytes[-steps_ago] - self.random.randrange(1, 400)
        whole = max(end for end in transaction_ends(self.aof.read_bytes()) if end <= size)
        self.aof_bytes = [taken for taken in self.aof_bytes if taken <= whole]
        with self.aof.open("r+b") as file:
            file.truncate(whole)


def transaction_ends(data: bytes) -> Iterator[int]:
    """Where the file may end. Redis 7.0.15 itself does not cut a torn transaction off: at the
    second restart its first half is carried out together with the next one (seen; Valkey 9.1 does
    it right).
    """
    place = 0
    in_transaction = False
    while place < len(data):
        words, place = _number(data, place)
        command = []
        for _ in range(words):
            size, place = _number(data, place)
            command.append(data[place : place + min(size, 8)].upper())
            place += size + 2
        in_transaction = command[0] == b"MULTI" or (in_transaction and command[0] != b"EXEC")
        if not in_transaction:
            yield place


def _number(data: bytes, place: int) -> tuple[int, int]:
    """The number behind `*` or `$`, and where its line ends."""
    end = data.index(b"\r\n", place)
    return int(data[place + 1 : end]), end + 2


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Site:
    return Site(tmp_path, getattr(request, "param", 0))


@pytest.mark.parametrize("site", [1, pytest.param(2, marks=pytest.mark.slow)], indirect=True)
def test_nothing_is_trained_twice_whatever_part_of_its_file_the_server_loses(site: Site) -> None:
    site.life()
    reasserted = 0
    for steps_ago in site.random.sample([1, 2, 3, 5, 7], 5):
        site.cut(min(steps_ago, len(site.aof_bytes)))
        reasserted += bool(site.life().recovery)
    assert reasserted >= 3
    # an older kept checkpoint, as when the newest one is damaged
    site.cut(4)
    site.life(older=1, regenerate=True)
    site.life()


def test_an_empty_server_is_filled_again_only_by_name(site: Site) -> None:
    site.life()
    shutil.rmtree(site.folder / "server")
    with pytest.raises(LostRun, match="no trainer has ever opened"):
        site.life()
    assert site.life(regenerate=True).recovery.oldest == STEPS
    assert not site.life().recovery


def test_an_older_checkpoint_is_trained_again_when_asked_by_name(site: Site) -> None:
    site.life()
    first = site.checkpoints[0]
    site.life(steps=6)
    site.checkpoints.insert(0, first)
    with pytest.raises(LedgerError, match="already freed"):
        site.life(older=2)
    site.checkpoints = [first]
    opening = site.life(regenerate=True, steps=8)
    assert opening.recovery.changed > 0
    site.life()


@pytest.mark.slow
def test_trainers_that_are_killed_in_the_middle_of_it_are_followed_by_one_that_ends_it(
    site: Site,
) -> None:
    site.life(steps=10)
    site.cut(7)
    position = site.folder / "position.json"
    position.write_text(site.checkpoints[-1].position, encoding="utf-8")
    with start_redis(site.folder / "server", *EVERYSEC) as url:
        for calls in (1, 2, 3, 4):
            program = [
                sys.executable, "-m", "tests.buffer.redis.server.open_and_die", url, str(position),
                str(calls),
            ]  # fmt: skip
            assert subprocess.run(program, cwd=ROOT, check=False).returncode == -signal.SIGKILL
            run = site.connect(url)
            assert run.control.state().mode == "run"
            assert run.store.client.hexists(run.keys.control, "recovering")
            assert run.account.fsck().clean
            run.store.close()
    site.life()
