from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.weights import delta
from buffer.weights.checksums import RawTensor, WrittenFiles, write_tensors
from buffer.weights.delta import DeltaSender
from buffer.weights.shared_folder import FolderSender
from buffer.weights.transport import PublishedWeights
from buffer.weights.transports import WeightsReceiver
from buffer.wire.rollout import PolicyVersion

WORDS = 3 * delta.BLOCK_WORDS + 17
EVERY = 4


class Publisher:
    """Publishes versions of a model that changes a little each time."""

    def __init__(self, folder: Path) -> None:
        sender = FolderSender(folder, keep=EVERY + 1)
        self._sender = DeltaSender(sender, folder, EVERY)
        self._draw = np.random.default_rng(0)
        self.words = self._draw.integers(0, 65_536, WORDS, dtype=np.uint16)
        self.published: list[PublishedWeights] = []
        self.contents: list[NDArray[np.uint16]] = []

    def publish(self, number: int | None = None) -> PublishedWeights:
        places = self._draw.choice(WORDS, WORDS // 50, replace=False)
        self.words[places] += self._draw.choice(np.array([1, 2, 65_535], np.uint16), len(places))
        self.words[-1] += 1  # of the block that is not full

        def save(folder: Path) -> WrittenFiles:
            (folder / "config.json").write_text("{}", encoding="utf-8")
            tensors = {"w": RawTensor("BF16", (WORDS,), self.words.data.cast("B"))}
            file = folder / "model.safetensors"
            return WrittenFiles({file.name: write_tensors(file, tensors, {})})

        version = PolicyVersion("l1", len(self.published) if number is None else number)
        self.published.append(self._sender.write(version, save))
        self.contents.append(self.words.copy())
        self._sender.prune()
        return self.published[-1]


def words_of(folder: Path) -> NDArray[np.uint16]:
    data = (folder / "model.safetensors").read_bytes()
    return np.frombuffer(data[8 + int.from_bytes(data[:8], "little") :], "<u2")


def of_folders() -> WeightsReceiver:
    return WeightsReceiver(cast(Store, None), Keys("r1"))


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path / "shared")


def test_every_receiver_gets_the_bytes_of_each_version_whatever_it_has_missed(
    publisher: Publisher,
) -> None:
    """One loads each, one every third (it misses two and three deltas), one is always new."""
    steady, rare = of_folders(), of_folders()
    kinds = []
    for number in range(2 * EVERY + 2):
        published = publisher.publish()
        kinds.append(delta.is_delta(Path(published.address)))
        receivers = [steady, of_folders()]
        if number % 3 == 1:
            receivers.append(rare)
        for receiver in receivers:
            receiver.check(published)
            folder = receiver.fetch(published)
            assert np.array_equal(words_of(folder), publisher.contents[number])
            assert (folder / "config.json").exists()
            receiver.keep_only(folder)
            assert np.array_equal(words_of(folder), publisher.contents[number])
        receivers[1].close()
    assert kinds == [number % EVERY != 0 for number in range(2 * EVERY + 2)]
    steady.close()
    rare.close()


@pytest.mark.parametrize("again", [1, 2])
def test_a_version_that_is_written_again_is_whole_and_others_are_made_of_it(
    publisher: Publisher, again: int
) -> None:
    for _ in range(3):
        publisher.publish()
    for number in (again, None, None):
        published = publisher.publish(number)
        assert delta.is_delta(Path(published.address)) == (number is None)
        receiver = of_folders()
        assert np.array_equal(words_of(receiver.fetch(published)), publisher.contents[-1])
        receiver.close()


def test_changes_of_a_step_are_small_and_large_ones_are_published_whole(
    publisher: Publisher,
) -> None:
    publisher.publish()
    small = Path(publisher.publish().address)
    assert sum(file.stat().st_size for file in small.iterdir()) < 0.1 * 2 * WORDS
    publisher.words[:] = np.random.default_rng(1).integers(0, 65_536, WORDS, dtype=np.uint16)
    assert not delta.is_delta(Path(publisher.publish().address))


def alter_base(base: Path, changes: Path) -> None:
    """As by a disk, after the base was verified and loaded."""
    data = bytearray((base / "model.safetensors").read_bytes())
    data[-9] ^= 1
    (base / "model.safetensors").write_bytes(data)


def alter_changes(base: Path, changes: Path) -> None:
    file = changes / "model.safetensors.delta"
    file.write_bytes(file.read_bytes()[:-1] + b"!")


def tear_changes(base: Path, changes: Path) -> None:
    file = changes / "model.safetensors.delta"
    file.write_bytes(file.read_bytes()[:-100])


def mix_changes(base: Path, changes: Path) -> None:
    """The changes of another version, under the name of this one."""
    shutil.copy(changes.parent / "l1-000001" / "model.safetensors.delta", changes)


@pytest.mark.parametrize("damage", [alter_base, alter_changes, tear_changes, mix_changes])
def test_damage_is_refused_and_the_chain_is_read_again_once_it_is_whole(
    publisher: Publisher, damage: Callable[[Path, Path], None]
) -> None:
    receiver = of_folders()
    publisher.publish()
    publisher.publish()
    base = receiver.fetch(publisher.published[1])
    receiver.keep_only(base)
    published = publisher.publish()
    changes = Path(published.address)
    saved = changes.parent.parent / "saved"
    shutil.copytree(changes, saved)
    damage(base, changes)
    with pytest.raises(WireError):
        receiver.fetch(published)
    shutil.rmtree(changes)
    shutil.copytree(saved, changes)
    assert np.array_equal(words_of(receiver.fetch(published)), publisher.contents[2])
    receiver.close()
