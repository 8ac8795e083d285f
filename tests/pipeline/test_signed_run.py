"""A whole run in which one worker has a key that the trainer does not know."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from buffer.run import Run
from buffer.store.signing import PRODUCER, Key, write_keys
from buffer.store.store import Store
from tests.pipeline.site import Site


def test_groups_of_a_worker_with_a_wrong_key_never_train(make_site: Callable[..., Site]) -> None:
    site = make_site(steps=6)
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
    with closing(Store(site.server.url, deadline_s=30.0)) as store:
        letters = Run.open(store, site.name).dead_letters.newest()
    assert {letter.worker for letter in letters} == {"worker-1"}
    assert all("signature of worker-1" in letter.reason for letter in letters)
    trained = {gid for _, gids in site.lines() for gid in gids}
    assert not trained & {letter.gid for letter in letters}
    written = [file for file in site.folder.rglob("*") if file.is_file() and file.suffix != ".keys"]
    for secret in [*own["worker-0"], *own[PRODUCER]]:
        assert not any(secret.encode() in file.read_bytes() for file in written)
