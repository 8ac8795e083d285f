from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from buffer.errors import WireError
from buffer.redis.bounds import BYTES_PER_VALUE
from buffer.weights import copies
from buffer.weights import folder_manifest as weights_manifest
from buffer.weights.copies import CopySender
from buffer.weights.redis_chunks import IN_CHUNKS, VersionStore
from buffer.wire.rollout import PolicyVersion
from tests.pipeline.yard import LINEAGE, Yard
from tests.servers import KINDS

on_both = pytest.mark.parametrize("make_yard", KINDS, indirect=True)
LABEL = "ab12cd34:4"
SIZES = {
    "a": 0, "b": 1, "c": BYTES_PER_VALUE, "d": BYTES_PER_VALUE + 1, "e": 9 * BYTES_PER_VALUE + 5,
}  # fmt: skip
"""No chunk, one, a full one, two, and more than one round trip carries."""


def chunks_of(yard: Yard) -> VersionStore:
    return VersionStore(yard.run.store, yard.run.keys)


def save(folder: Path) -> None:
    for seed, (name, size) in enumerate(SIZES.items()):
        (folder / name).write_bytes(
            bytes((seed + place) % 251 for place in range(7)) * (size // 7) + b"x" * (size % 7)
        )


@on_both
def test_a_version_is_read_as_it_was_written(yard: Yard, tmp_path: Path) -> None:
    address, checksum = CopySender(chunks_of(yard), tmp_path).write(
        PolicyVersion("ab12cd34", 4), save
    )
    assert address == IN_CHUNKS + LABEL
    (came := tmp_path / "came").mkdir()
    copies.read(chunks_of(yard), LABEL, checksum, came)
    (wanted := tmp_path / "wanted").mkdir()
    save(wanted)
    assert all((came / name).read_bytes() == (wanted / name).read_bytes() for name in SIZES)
    assert sorted(file.name for file in came.iterdir()) == sorted([*SIZES, weights_manifest.NAME])


@pytest.mark.parametrize("damage", ["gone", "changed", "unfinished", "other", "name"])
def test_a_version_is_refused_that_is_not_what_was_published(
    yard: Yard, tmp_path: Path, damage: str
) -> None:
    _, checksum = CopySender(chunks_of(yard), tmp_path).write(PolicyVersion("ab12cd34", 4), save)
    raw = yard.store.client
    part = yard.run.keys.weights_part
    if damage == "gone":
        raw.delete(part(LABEL, 7))
    elif damage == "changed":
        raw.setrange(part(LABEL, 7), 1000, b"other")
    elif damage == "unfinished":
        raw.delete(part(LABEL))
    elif damage == "other":
        checksum = "0" * 32
    else:
        (evil := tmp_path / "evil").mkdir()
        (evil / weights_manifest.NAME).write_bytes(
            orjson.dumps({"files": {"../out": {"bytes": 0, "algorithm": "xxh3", "parts": []}}})
        )
        raw.set(part(LABEL), (evil / weights_manifest.NAME).read_bytes())
        checksum = weights_manifest.digest((evil / weights_manifest.NAME).read_bytes())
    (came := tmp_path / "came").mkdir()
    with pytest.raises(WireError):
        copies.read(chunks_of(yard), LABEL, checksum, came)
    assert not (tmp_path / "out").exists()


@on_both
def test_only_the_newest_versions_and_no_unfinished_one_are_kept(yard: Yard) -> None:
    transport = CopySender(chunks_of(yard), yard.folder, keep=2)
    for version in range(4):
        transport.write(PolicyVersion(LINEAGE, version), save)
        transport.prune()
    assert chunks_of(yard).names() == [f"{LINEAGE}:2", f"{LINEAGE}:3"]
    yard.store.client.delete(
        yard.run.keys.weights_part(f"{LINEAGE}:2")
    )  # as a trainer leaves it that dies here
    CopySender(chunks_of(yard), yard.folder).clear()
    chunks = 1 + 1 + 2 + 10
    newest = {yard.run.keys.weights_part(f"{LINEAGE}:3", number) for number in range(chunks + 1)}
    assert {
        key.decode() for key in yard.store.client.scan_iter(f"{yard.run.keys.weights}*", count=1000)
    } == newest | {yard.run.keys.weights}
