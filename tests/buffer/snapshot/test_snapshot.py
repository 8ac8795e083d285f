"""A run that was saved and resumed is the same run (I1, I5, I6); what is not whole is refused, and
leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from buffer.config.assignments import parse_settings
from buffer.errors import (
    ConfigError,
    PayloadMissing,
    RunExists,
    RunNotFound,
    SchemaVersionError,
    SnapshotError,
)
from buffer.ids import group_id, new_nonce
from buffer.maintenance.remove_run import remove_run
from buffer.redis.bounds import BYTES_PER_VALUE
from buffer.redis.key_table import row_of
from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.run.settings import LiveSettings
from buffer.snapshot import folder as on_disk
from buffer.wire.rollout import PolicyVersion, Status
from tests.buffer.faulty_store import FaultyStore
from tests.buffer.keyspace import dump, run_keys
from tests.buffer.scene import FIRST, LIMITS, Scene, extend, turn
from tests.servers import start_server

ROLES = {b"trainer", b"producer", b"trainer_closed", b"producer_closed"}


def fill(scene: Scene) -> Scene:
    """Groups in every place but running, dead letters, an evaluation, three batches."""
    scene.open_trainer(lineage="l0")
    scene.enqueue(12, samples=[2] * 11 + [0])
    jobs = scene.claim(9)
    for job, version in zip(jobs[:5], (1, 0, 1, 0, 0), strict=True):
        scene.submit(job, PolicyVersion("l0", version))
    scene.submit(jobs[5], status=Status.ABORTED)
    scene.submit(jobs[6], filtered=True)
    scene.run.jobs.release("w0", jobs[7], "failed", "a judge said no")
    scene.take(1), scene.take(2), scene.take(3, math=1)
    scene.run.ledger.commit(scene.trainer, 2, 1)
    scene.enqueue(3, task="quiz")
    scene.ready(0, 0, task="code")
    scene.run.evaluations.take(scene.trainer, 1, {"quiz": 1}, strict=False)
    scene.claim(1)
    scene.rest()
    scene.check()
    return scene


@pytest.fixture
def busy(make_scene: Callable[..., Scene]) -> Scene:
    return fill(make_scene(max_tries=1, stale_threshold=9))


def resumed(scene: Scene, folder: Path, **options: Any) -> Scene:
    other = object.__new__(Scene)
    other.run = Run.restore(scene.store, folder, name=f"{scene.name}-again", **options)
    other.store = scene.store
    other.raw = scene.raw
    other.name = other.run.name
    other.keys = other.run.keys
    other.producer = ""
    other.trainer = ""
    other.nonces = {}
    return other


def without_roles(control: dict[bytes, bytes]) -> dict[bytes, bytes]:
    return {name: value for name, value in control.items() if name not in ROLES}


def names_of(scene: Scene, name: str) -> list[str]:
    return run_keys(scene.raw, name)


def test_resumed_run_is_the_same_but_for_workers_roles_and_events(
    busy: Scene, tmp_path: Path
) -> None:
    facts = busy.run.save(tmp_path / "s")
    before = busy.dump()
    other = resumed(busy, tmp_path / "s")
    after = other.dump()
    other.check()
    assert facts.keys == len(after)
    assert other.run.nonce == busy.run.nonce
    assert other.run.limits == busy.run.limits
    for name in [name for name in before if not row_of(busy.keys.prefix + name).saved]:  # type: ignore[union-attr]
        before.pop(name)
    # bytes of a filtered group: no script accepted them, and they expire
    for name in [name for name in before if busy.raw.ttl(busy.keys.prefix + name) > 0]:
        before.pop(name)
    before["control"], after["control"] = (
        without_roles(before["control"]),
        without_roles(after["control"]),
    )
    assert after == before


def test_a_run_that_does_not_rest_is_not_saved(busy: Scene, tmp_path: Path) -> None:
    busy.claim(1)
    with pytest.raises(SnapshotError, match="1 groups of run"):
        busy.run.save(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_turns_of_a_worker_that_died_are_in_the_snapshot(scene: Scene, tmp_path: Path) -> None:
    scene.enqueue(1)
    (job,) = scene.claim()
    kept = scene.turns(job)
    for number in range(2):
        kept.add(turn(number))
        kept.store()
    scene.expire_leases()
    scene.run.jobs.reap()
    scene.run.save(tmp_path / "s")
    other = resumed(scene, tmp_path / "s")
    (again,) = other.claim()
    turns = other.run.buffer.read(again.payload).turns
    assert [int(state.response_ids[0]) for state in turns] == [0, 1]
    other.check()


def test_resumed_run_delivers_the_same_batches_byte_for_byte_and_goes_on(
    busy: Scene, tmp_path: Path
) -> None:
    taken = {step: busy.run.ledger.manifest(step) for step in (2, 3)}
    payloads = [busy.run.payloads.read(e.payload) for m in taken.values() if m for e in m.entries]
    busy.run.save(tmp_path / "s")
    other = resumed(busy, tmp_path / "s")
    with pytest.raises(Exception, match="step 0"):
        other.open_trainer(0)
    other.open_trainer(1, "l2")
    again = {step: other.take(step) for step in (2, 3)}
    assert again == taken
    assert [
        other.run.payloads.read(e.payload) for m in again.values() for e in m.entries
    ] == payloads
    order = [gid for gid, _ in other.pool("completed")]
    assert other.take(4, math=len(order)).gids == order
    # the next draw, the next arrival
    assert other.run.jobs.cursor("math") == busy.run.jobs.cursor("math")
    assert other.enqueue(1).cursor == busy.run.jobs.cursor("math") + 1
    arrivals = int(busy.counters()["arrivals"])
    job = next(job for job in other.claim(9) if job.task == "math")
    other.submit(job)
    assert int(other.record(job.gid)["arrival"]) == arrivals + 1
    other.check()


def test_payloads_of_several_chunks(scene: Scene, tmp_path: Path) -> None:
    scene.enqueue(2)
    for job in scene.claim(2):
        group = extend(scene.run.buffer.read(job.payload), Status.COMPLETED, FIRST)
        group.states[0].response = "x" * (BYTES_PER_VALUE * 2)
        scene.run.buffer.submit("w0", job, type(group)(group.gid, group.task, group.states), 4)
    scene.run.save(tmp_path / "s")
    other = resumed(scene, tmp_path / "s")
    for draw in range(2):
        ref, again = (s.payload(group_id("math", draw)) for s in (scene, other))
        assert ref.chunks == 3
        assert scene.run.payloads.read(ref) == other.run.payloads.read(again)
    other.check()


MOVES: dict[str, Callable[[Scene], object]] = {
    "claim": lambda busy: busy.claim(1),
    "submit": lambda busy: busy.submit(busy.claim(1)[0]),
    "take": lambda busy: busy.take(4, math=1),
    "commit": lambda busy: busy.run.ledger.commit(busy.trainer, 3, 2),
    "enqueue": lambda busy: busy.enqueue(1),
    "drop": lambda busy: busy.run.jobs.drop(busy.pool("completed")[0][0]),
    "requeue": lambda busy: busy.run.jobs.requeue(busy.pool("completed")[0][0]),
    "set": lambda busy: busy.run.set(parse_settings(LiveSettings, ["max_tries=7"])),
    "publish": lambda busy: busy.run.control.publish_weights(
        busy.trainer, PolicyVersion("l0", 1), "/w", ""
    ),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_copy_during_which_the_run_moved_is_discarded(
    busy: Scene, tmp_path: Path, move: str
) -> None:
    def advance(what: str, done: int) -> None:
        if done == 5:
            MOVES[move](busy)

    with pytest.raises(SnapshotError, match="changed while"):
        busy.run.save(tmp_path / "never", advance=advance)
    assert list(tmp_path.iterdir()) == []


def test_heartbeats_and_the_janitor_do_not_disturb_a_copy(busy: Scene, tmp_path: Path) -> None:
    def advance(what: str, done: int) -> None:
        busy.run.control.renew_role("trainer", busy.trainer)
        busy.run.control.renew_role("producer", busy.producer)
        busy.beat([])
        busy.run.payloads.collect()

    busy.run.save(tmp_path / "s", advance=advance)
    resumed(busy, tmp_path / "s").check()


def test_lost_payload_is_an_error_and_leaves_no_folder(busy: Scene, tmp_path: Path) -> None:
    gid = busy.pool("completed")[0][0]
    busy.raw.delete(busy.keys.payload(gid, busy.record(gid)["payload"]))
    with pytest.raises(SnapshotError, match=gid):
        busy.run.save(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_folder_that_holds_something_is_refused(busy: Scene, tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    with pytest.raises(SnapshotError, match="not an empty folder"):
        busy.run.save(tmp_path)


def test_resume_refuses_a_run_that_is_there(busy: Scene, tmp_path: Path) -> None:
    busy.run.save(tmp_path / "s")
    before = busy.dump()
    with pytest.raises(RunExists, match="the server has a run"):
        Run.restore(busy.store, tmp_path / "s")
    assert busy.dump() == before
    with pytest.raises(ConfigError, match="run name"):
        Run.restore(busy.store, tmp_path / "s", name="a:b")


def test_resume_refuses_leftovers_of_a_run_without_its_meta(busy: Scene, tmp_path: Path) -> None:
    busy.run.save(tmp_path / "s")
    busy.raw.delete(busy.keys.meta)
    before = busy.dump()
    with pytest.raises(RunExists, match="has keys of"):
        Run.restore(busy.store, tmp_path / "s")
    assert busy.dump() == before


def damaged(folder: Path) -> list[tuple[str, Callable[[], object]]]:
    keys = folder / on_disk.KEYS
    manifest = folder / on_disk.MANIFEST
    data = keys.read_bytes()
    flipped = bytes([data[100] ^ 1])
    altered = manifest.read_bytes().replace(b'"keys": ', b'"keys": 1')
    return [
        ("was truncated", lambda: keys.write_bytes(data[:-1])),
        ("was truncated", lambda: keys.write_bytes(data + b"\x00")),
        ("altered", lambda: keys.write_bytes(data[:100] + flipped + data[101:])),
        ("altered", lambda: (folder / "more").write_bytes(b"more")),
        ("cannot read", keys.unlink),
        ("was altered", lambda: manifest.write_bytes(altered)),
        ("is not a snapshot", lambda: manifest.write_bytes(manifest.read_bytes()[:-9])),
        ("is not a snapshot", lambda: manifest.write_bytes(b"{}")),
        ("is not a snapshot", manifest.unlink),
    ]


@pytest.mark.parametrize("which", range(9))
def test_resume_refuses_what_was_cut_off_or_altered_and_leaves_nothing(
    busy: Scene, tmp_path: Path, which: int
) -> None:
    busy.run.save(tmp_path / "s")
    words, damage = damaged(tmp_path / "s")[which]
    damage()
    with pytest.raises(SnapshotError, match=words):
        resumed(busy, tmp_path / "s")
    assert names_of(busy, f"{busy.name}-again") == []


def test_resume_refuses_another_schema_and_another_version(
    busy: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy.run.save(tmp_path / "s")
    monkeypatch.setattr("buffer.snapshot.loader.SCHEMA", "99")
    with pytest.raises(SchemaVersionError, match="this version reads 99"):
        resumed(busy, tmp_path / "s")
    monkeypatch.setattr("buffer.snapshot.folder.VERSION", 99)
    with pytest.raises(SchemaVersionError, match="this one reads 99"):
        resumed(busy, tmp_path / "s")
    assert names_of(busy, f"{busy.name}-again") == []


def test_a_broken_run_is_not_saved(busy: Scene, tmp_path: Path) -> None:
    busy.raw.hincrby(busy.keys.progress("math"), "enqueued", 1)
    with pytest.raises(SnapshotError, match="does not add up"):
        busy.run.save(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_nobody_can_open_a_run_that_is_being_resumed(busy: Scene, tmp_path: Path) -> None:
    busy.run.save(tmp_path / "s")
    seen = []

    def advance(what: str, done: int) -> None:
        with pytest.raises(RunNotFound, match="being restored"):
            Run.open(busy.store, f"{busy.name}-again")
        with pytest.raises(RunExists):
            Run.create(busy.store, f"{busy.name}-again", new_nonce(), LIMITS, FIRST, "/w")
        with pytest.raises(RunExists, match="or what a restore left"):
            resumed(busy, tmp_path / "s")
        seen.append(done)

    resumed(busy, tmp_path / "s", advance=advance).check()
    assert seen


def test_what_an_interrupted_resume_left_is_removed_by_name(
    busy: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy.run.save(tmp_path / "s")
    name = f"{busy.name}-again"

    def stop(what: str, done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resumed(busy, tmp_path / "s", advance=stop)
    assert names_of(busy, name) == []
    # killed: nothing was undone
    with monkeypatch.context() as patch:
        patch.setattr("buffer.snapshot.loader.clear_keys", lambda *_: None)
        patch.setattr(Store, "ask", partialmethod(ask_but_unlink))
        with pytest.raises(KeyboardInterrupt):
            resumed(busy, tmp_path / "s", advance=stop)
    assert names_of(busy, name)
    with pytest.raises(RunExists, match="or what a restore left"):
        resumed(busy, tmp_path / "s")
    remove_run(busy.store, Keys(name))
    resumed(busy, tmp_path / "s").check()


_ask = Store.ask


def ask_but_unlink(store: Store, what: str, *command: Any) -> Any:
    return None if command[0] == "UNLINK" else _ask(store, what, *command)


def test_a_run_that_was_removed_while_it_was_restored_stays_away(
    busy: Scene, tmp_path: Path
) -> None:
    busy.run.save(tmp_path / "s")

    def advance(what: str, done: int) -> None:
        busy.raw.delete(f"rmq:{{{busy.name}-again}}:meta")

    with pytest.raises(SnapshotError, match="was removed while"):
        resumed(busy, tmp_path / "s", advance=advance)
    assert names_of(busy, f"{busy.name}-again") == []


def test_resume_goes_on_when_connections_are_killed(
    busy: Scene, store: Store, tmp_path: Path
) -> None:
    def kill(what: str, done: int) -> None:
        for client in busy.raw.client_list():
            if client["name"].startswith("rolloutmq"):
                busy.raw.client_kill_filter(_id=client["id"])

    busy.run.save(tmp_path / "s")
    resumed(busy, tmp_path / "s", advance=kill).check()


def test_a_restore_whose_replies_are_lost_writes_nothing_twice(
    busy: Scene, store: Store, tmp_path: Path
) -> None:
    busy.run.save(tmp_path / "s")
    busy.store = FaultyStore(store.url, repeats=["none"])  # its writes, too, are repeated
    resumed(busy, tmp_path / "s").check()
    busy.store.close()


def test_any_msgpack_library_reads_the_files(busy: Scene, tmp_path: Path) -> None:
    busy.run.save(tmp_path / "s")
    kinds = set()
    for file in (tmp_path / "s").glob("*.msgpack"):
        unpacker = msgpack.Unpacker()
        unpacker.feed(file.read_bytes())
        for kind, key, _ in unpacker:
            kinds.add(kind)
            assert not key.startswith("rmq:")
    assert kinds == {"hash", "zset", "stream", "list", "set", "string"}


def test_parts_of_long_values_keep_the_order_of_pools_and_streams(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.snapshot.saver.KEYS_AT_ONCE", 3)
    monkeypatch.setattr("buffer.snapshot.loader.MEMBERS_AT_ONCE", 3)
    scene.open_trainer(lineage="l0")
    versions = np.random.default_rng(0).integers(0, 4, 20).tolist()
    scene.ready(*versions)
    scene.enqueue(11)
    scene.take(1, math=7)
    scene.run.ledger.commit(scene.trainer, 1, 1)
    scene.run.save(tmp_path / "s")
    other = resumed(scene, tmp_path / "s")
    assert other.pool("completed") == scene.pool("completed")
    assert other.stream("fresh") == scene.stream("fresh")
    assert dump(scene.raw, other.name)["ended:math:archived"] == scene.dump()["ended:math:archived"]
    other.check()


@pytest.mark.parametrize("kinds", [("valkey", "redis"), ("redis", "valkey")])
def test_snapshot_of_one_kind_of_server_resumes_on_the_other(
    tmp_path: Path, kinds: tuple[str, str]
) -> None:
    folder = tmp_path / "s"
    with start_server(kinds[0], tmp_path / "a") as one, one.connect() as raw:
        store = Store(one.url)
        scene = Scene(
            store, raw, "moved", LIMITS.model_copy(update={"max_tries": 1, "stale_threshold": 9})
        )
        fill(scene).run.save(folder)
        manifest = scene.run.ledger.manifest(3)
        store.close()
    with start_server(kinds[1], tmp_path / "b") as other:
        store = Store(other.url)
        run = Run.restore(store, folder)
        assert run.account.fsck().clean
        assert run.ledger.manifest(3) == manifest
        store.close()


def test_retained_batches_stay_readable_and_are_freed_as_before(
    make_scene: Callable[..., Scene], tmp_path: Path
) -> None:
    scene = make_scene(retain_batches=2, stale_threshold=9)
    scene.open_trainer(lineage="l0")
    scene.ready(*[0] * 10)
    entries = scene.take(1, math=2).entries
    scene.run.ledger.quarantine(scene.trainer, 2, scene.take(2, math=2).entries[0], "damaged")
    scene.run.ledger.commit(scene.trainer, 1, 1)
    scene.run.save(tmp_path / "s")
    other = resumed(scene, tmp_path / "s")
    manifest = other.run.ledger.manifest(1)
    assert manifest is not None
    assert (manifest.archived, manifest.entries) == (True, entries)
    for entry in entries:
        kept = [run.payloads.read(entry.payload) for run in (other.run, scene.run)]
        assert kept[0] == kept[1]
    assert other.run.ledger.archive.steps() == range(1, 2)
    other.open_trainer(1, "l1")
    other.take(2), other.take(3), other.take(4)
    other.run.ledger.commit(other.trainer, 4, 3)
    other.run.janitor.sweep()
    assert other.run.ledger.archive.steps() == range(2, 4)
    for entry in entries:
        with pytest.raises(PayloadMissing):
            other.run.payloads.read(entry.payload)
    other.check()


def test_group_that_died_of_its_bytes_does_not_stop_a_snapshot(
    scene: Scene, tmp_path: Path
) -> None:
    scene.open_trainer(lineage="l0")
    scene.ready(0, 0)
    entry = scene.take(1).entries[0]
    name = scene.keys.payload(entry.gid, entry.payload.token)
    scene.raw.delete(name)
    with pytest.raises(SnapshotError, match=entry.gid):
        scene.run.save(tmp_path / "no")
    scene.run.ledger.quarantine(scene.trainer, 1, entry, "gone")
    scene.run.save(tmp_path / "s")
    other = resumed(scene, tmp_path / "s")
    other.check()
    assert other.raw.get(other.keys.payload(entry.gid, entry.payload.token)) == scene.raw.get(name)
    assert [letter.reason for letter in other.run.dead_letters.newest()] == ["gone"]
    assert other.run.jobs.requeue(entry.gid) == "dead"
    (job,) = other.claim()
    assert (job.gid, other.run.buffer.read(job.payload).status) == (entry.gid, Status.INIT)
    other.submit(job)
    other.check()
