"""A trainer that knows the keys of its workers, and a thief with a password of the server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from buffer.errors import SignatureError
from buffer.groups.submit import Submission
from buffer.ids import new_nonce
from buffer.job import Job, PayloadRef, Result
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.payloads import checksum
from buffer.redis.signing import PRODUCER, Key, Signer, read_keys, write_keys
from buffer.redis.store import RunContext, Store
from buffer.run import Run
from buffer.wire import group_bytes
from buffer.wire.framing import split_signed
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import Status
from consumer.handle.rollout_consumer import RolloutConsumer
from tests.buffer.scene import FIRST, Scene, extend
from tests.consumer.conftest import Trainers, die
from tests.servers import Server, on_both

LIMITS = RunLimits(stale_threshold=10_000, role_timeout_ms=60_000, tasks={"math": TaskLimits()})
KEYS = {name: Key.new(name) for name in ("w1", "w2", "stranger", PRODUCER)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "workers.keys"
    write_keys(file, {name: [KEYS[name].secret] for name in ("w1", "w2")})
    return file


class Yard(Scene):
    """Every process has a `Run` of its own: only that of the trainer, `run`, checks signatures."""

    def party(self, name: str | None) -> Run:
        """Return the run as a worker or the producer opens it that has the key `name`."""
        run = Run.open(self.store, self.name)
        if name:
            run.sign_with(KEYS[name])
        return run

    def trainer_of(self, trainer: Callable[..., RolloutConsumer], file: Path) -> RolloutConsumer:
        run = self.party(None)
        run.check_signatures(file)
        return trainer(run)

    def work(self, job: Job, name: str | None, status: Status = Status.COMPLETED) -> None:
        """Sample a claimed group as the worker `name` does."""
        run = self.party(name)
        group = extend(run.buffer.read(job.payload), status, FIRST)
        run.buffer.submit("w0", job, group, 4)

    def good(self) -> str:
        (job,) = self.claim(1)
        self.work(job, "w1")
        return job.gid

    def store_as(self, job: Job, data: bytes) -> None:
        """What a thief can do: store bytes for a claim, and call the script."""
        ref, commands = self.run.payloads.commands(job.gid, job.token, [data])
        self.store.write("payload write", commands)
        submission = Submission(
            RunContext(self.store, self.keys, self.run.limits), self.run.payloads
        )
        group = group_bytes.decode(data)
        group = RolloutGroup(job.gid, "math", group.states)
        unit = submission.unit(Result(job, group, 4), ref)
        self.store.call("submit", *submission.call("w0", job.task, [unit]))


@pytest.fixture
def yard(server: Server, store: Store, run_name: str) -> Yard:
    return Yard(store, server.connect(), run_name, LIMITS)


def as_stored(yard: Yard, job: Job, name: str, nonce: str = "", token: str = "") -> bytes:
    """The bytes that the worker `name` would store."""
    data = unsigned(yard, job)
    signer = Signer(nonce or yard.run.nonce, KEYS[name])
    return signer.sign(job.gid, token or job.token, [data]) + data


def unsigned(yard: Yard, job: Job) -> bytes:
    return group_bytes.encode(extend(yard.run.buffer.read(job.payload), Status.COMPLETED, FIRST))


def of_another_group(yard: Yard, job: Job) -> bytes:
    """Signed for the group before it, with this one inside."""
    data = unsigned(yard, job)
    other = f"math-{int(job.gid[-10:]) + 1:010d}"
    return Signer(yard.run.nonce, KEYS["w1"]).sign(other, job.token, [data]) + data


FORGERIES: dict[str, Callable[[Yard, Job], bytes]] = {
    "is not signed": unsigned,
    "not those that were signed": lambda yard, job: as_stored(yard, job, "w1").replace(
        b"score", b"SCORE"
    ),
    "signature of w1 .* is not of its key": lambda yard, job: as_stored(yard, job, "w2").replace(
        b" w2 ", b" w1 "
    ),
    "signature of stranger .* has no key": lambda yard, job: as_stored(yard, job, "stranger"),
    "for another claim": lambda yard, job: as_stored(yard, job, "w1", token=new_nonce()),
    "w1 .* not of its key": lambda yard, job: as_stored(yard, job, "w1", nonce=new_nonce()),
    "signature of w1 .* not of its key": of_another_group,
}


@on_both
def test_forged_groups_are_quarantined_and_training_goes_on(
    yard: Yard, file: Path, trainer: Trainers
) -> None:
    yard.enqueue(2 * len(FORGERIES))
    forged, good = {}, []
    for reason, forge in FORGERIES.items():
        (job,) = yard.claim(1)
        yard.store_as(job, forge(yard, job))
        forged[job.gid] = reason
        good.append(yard.good())
    consumer = yard.trainer_of(trainer, file)
    batch = consumer.take_batch(1, {"math": len(good)}, deadline_s=400.0)
    assert sorted(batch.manifest.gids) == good
    letters = {letter.gid: letter.reason for letter in yard.run.dead_letters.newest()}
    assert letters.keys() == forged.keys()
    for gid, reason in forged.items():
        assert re.match(f"SignatureError: .*{reason}", letters[gid]), letters[gid]
    events = [
        fields["gid"] for _, (_, name, fields) in yard.run.events.read() if name == "quarantined"
    ]
    assert set(events) == set(forged)
    yard.check()


def test_a_key_is_removed_while_a_trainer_runs_and_before_it_starts_again(
    yard: Yard, file: Path, trainer: Trainers
) -> None:
    yard.enqueue(14)
    jobs = yard.claim(14)
    for job, name in zip(jobs, ["w1", "w2"] * 7, strict=True):
        yard.work(job, name)
    of_w1 = {job.gid for job in jobs[::2]}

    def open_again() -> RolloutConsumer:
        return yard.trainer_of(lambda run: trainer(run, take_over=True), file)

    def take(step: int) -> list[str]:
        return consumer.take_batch(step, {"math": 2}, deadline_s=400.0).manifest.gids

    consumer = open_again()
    first = take(1)
    assert not of_w1.issuperset(first)
    die(consumer)
    consumer = open_again()
    assert take(1) == first
    write_keys(file, {"w1": read_keys(file)["w1"]})
    take(2)  # it may be read ahead, with the key that was valid then
    assert of_w1.issuperset(take(3))
    die(consumer)
    consumer = open_again()
    for step in (1, 2, 3):  # delivered again, and w2 is replaced
        assert of_w1.issuperset(gids := take(step))
        assert len(gids) == 2
    yard.check()


def test_a_restored_run_trains_what_was_signed_before(
    yard: Yard, file: Path, trainer: Trainers, tmp_path: Path
) -> None:
    """Under another name, too; what is put or updated is signed by who does it."""
    yard.enqueue(2)
    signed, updated = yard.good(), yard.good()
    curator = yard.party("w2")
    states = curator.buffer.read(yard.payload(updated)).states
    curator.buffer.update(updated, states)
    (put,) = curator.buffer.put("math", [states])
    (unsigned,) = yard.run.buffer.put("math", [states])
    yard.run.save(tmp_path / "saved")
    restored = Run.restore(yard.store, tmp_path / "saved", name=f"{yard.name}-again")
    restored.check_signatures(file)
    consumer = trainer(restored)
    batch = consumer.take_batch(1, {"math": 4}, strict=False)
    assert sorted(batch.manifest.gids) == sorted([signed, updated, put])
    assert [letter.gid for letter in restored.dead_letters.newest()] == [unsigned]


def test_a_thief_cannot_alter_what_honest_workers_continue(
    yard: Yard, file: Path, trainer: Trainers
) -> None:
    """A second worker ends an interrupted group; of a forged one, it refuses to."""
    write_keys(file, read_keys(file) | {PRODUCER: [KEYS[PRODUCER].secret]})
    yard.open_producer()
    yard.run, plain = yard.party(PRODUCER), yard.run
    yard.enqueue(4)
    yard.run = plain
    jobs = yard.claim(4)
    for job in jobs[:3]:
        yard.work(job, "w1", Status.ABORTED)
    forged, prompt = jobs[1], jobs[3]
    overwrite(yard, yard.payload(forged.gid), lambda data: data.replace(b"abort", b"ABORT"))
    yard.run.jobs.release("w0", prompt, "handback")
    overwrite(yard, prompt.prompt, lambda data: bytes(split_signed(data)[1]))
    yard.run.jobs.reissue(yard.producer, "math", "aborted", 1000)
    for job in sorted(yard.claim(4), key=lambda job: job.gid != prompt.gid):
        if job.gid == forged.gid:
            with pytest.raises(SignatureError, match="not those that were signed"):
                yard.work(job, "w2")
        else:
            yard.work(job, "w2")
    consumer = yard.trainer_of(trainer, file)
    batch = consumer.take_batch(1, {"math": 2}, deadline_s=400.0)
    assert sorted(batch.manifest.gids) == sorted([jobs[0].gid, jobs[2].gid])
    (letter,) = yard.run.dead_letters.newest()
    assert letter.gid == prompt.gid
    assert "its prompt not by the producer" in letter.reason


def overwrite(yard: Yard, ref: PayloadRef, change: Callable[[bytes], bytes]) -> None:
    """Replace bytes, and size and checksum in the record."""
    name = yard.keys.payload(ref.gid, ref.token)
    before = yard.raw.get(name)
    after = change(before)
    assert after != before
    yard.raw.set(name, after)
    facts = {"size": len(after), "prompt": len(after), "crc": checksum(after)}
    yard.raw.hset(yard.keys.group(ref.gid), mapping=facts)
