"""Real workers that sign, of which one has a key that the trainer does not know."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from buffer.control.control import Mode
from buffer.redis.signing import PRODUCER, Key, write_keys
from buffer.redis.store import Store
from buffer.run import Run
from buffer.wire.framing import signers
from tests.pipeline.site import Site
from tests.pipeline.yard import Yard


async def test_a_second_worker_continues_what_the_first_has_signed(
    yard: Yard, tmp_path: Path
) -> None:
    known = tmp_path / "workers.keys"
    keys = [Key.new(name) for name in (PRODUCER, "w0", "w1")]
    write_keys(known, {key.worker: [key.secret] for key in keys})
    yard.run.sign_with(keys[0])
    continued, stolen = yard.enqueue(2, (50, 50))
    yard.run.sign_with(keys[1])
    async with yard.working(yard.worker(held=True, partial_rollout=True)) as engine:
        await yard.until_generating(engine, 4)
        await yard.receipts(yard.control(Mode.ABORT))
    name = yard.run.keys.payload(stolen, yard.run.record(stolen)["payload"])
    yard.store.control.set(name, bytes(reversed(yard.store.control.get(name))))
    yard.control(Mode.RUN)
    assert yard.reissue() == 2
    yard.run.sign_with(keys[2])
    async with yard.working(yard.worker("w1", partial_rollout=True)):
        await yard.until_places(completed=2)
    yard.run.payloads.signer = None
    yard.run.check_signatures(known)
    assert signers(yard.group(continued).signatures) == ["w0", "w1"]
    # started again from its prompt
    assert signers(yard.group(stolen).signatures) == ["w1"]
    yard.check()


def test_groups_of_a_worker_with_a_wrong_key_never_train(make_site: Callable[..., Site]) -> None:
    site = make_site(steps=4, token_s=0.1)  # so that both workers take part
    known, fleet = site.folder / "workers.keys", site.folder / "fleet.keys"
    own = {name: [Key.new(name).secret] for name in (PRODUCER, "worker-0", "worker-1")}
    write_keys(known, own)
    write_keys(fleet, own | {"worker-1": [Key.new("worker-1").secret]})
    options = [
        "launch.workers=2",
        f"trainer.keys_file={known}",
        f"worker.key_file={fleet}",
        f"producer.key_file={fleet}",
    ]
    run = site.start("run", *[part for option in options for part in ("--set", option)])
    assert run.wait() == 0, site.words()
    site.check()
    site.server.start()
    with closing(Store(site.server.url, deadline_s=400.0)) as store:
        letters = Run.open(store, site.name).dead_letters.newest()
    assert {letter.worker for letter in letters} == {"worker-1"}
    assert all("signature of worker-1" in letter.reason for letter in letters)
    trained = {gid for _, gids in site.lines() for gid in gids}
    assert not trained & {letter.gid for letter in letters}
    written = [file for file in site.folder.rglob("*") if file.is_file() and file.suffix != ".keys"]
    for secret in [*own["worker-0"], *own[PRODUCER]]:
        assert not any(secret.encode() in file.read_bytes() for file in written)
