"""Weights from a trainer's memory to an engine's processes: all or none, on any death."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

from buffer.errors import WireError
from buffer.weights import folder_manifest as weights_manifest
from buffer.weights import process_group
from buffer.weights.receiver import WeightsReceiver
from buffer.weights.redis_chunks import OFFERED, VersionStore
from buffer.weights.rendezvous import NONCE_BYTES, Rendezvous
from buffer.weights.shared_folder import FolderSender
from buffer.weights.transport import Announcement, PublishedWeights, TransportName
from buffer.wire.rollout import PolicyVersion
from consumer.senders import tensor_server
from consumer.senders.tensor_server import MemorySnapshot, TensorServer
from consumer.senders.transfer import TransferSender, open_sender
from producer_workers.engines.base import WeightsError
from producer_workers.engines.tensor_receiver import TensorReceiver
from tests.pipeline.handover import CHUNK_BYTES, LABEL, announce, save
from tests.pipeline.yard import FIRST, LINEAGE, WatchedEngine, Yard

DEADLINE_S = 300.0


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[tuple[TensorServer, Announcement]]:
    """One that offers the weights of `save`."""
    server = TensorServer("127.0.0.1", "gloo")
    yield (
        server,
        announce(server, MemorySnapshot.take(LABEL, save, "rolloutmq-test-"), tmp_path / "nowhere"),
    )
    server.close()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def received(announced: Announcement) -> dict[str, torch.Tensor]:
    """All that comes. Raises what the receiver says."""
    receiver = TensorReceiver(announced, limit_s=DEADLINE_S)
    until(receiver.is_done)
    return dict(receiver.tensors())


def written(folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    save(folder)
    return written_in(folder)


def written_in(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_whole(came: dict[str, torch.Tensor], folder: Path) -> None:
    wanted = written(folder)
    assert came.keys() == wanted.keys()
    assert all(torch.equal(came[name], wanted[name]) for name in wanted)


def moved(announced: Announcement, port: int = 0, token: str = "") -> Announcement:
    """Return the same announcement for another address or secret."""
    return replace(announced, port=port or announced.port, token=token or announced.token)


@pytest.mark.parametrize("token", ["", "0" * 64], ids=["silent", "with another token"])
def test_a_stranger_gets_32_random_bytes_and_the_door(
    trainer: tuple[TensorServer, Announcement], tmp_path: Path, token: str
) -> None:
    server, announced = trainer
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as stranger:
        assert len(stranger.recv(1000)) == NONCE_BYTES
        if token:
            stranger.sendall(bytes(2 * NONCE_BYTES))
            assert stranger.recv(1000) == b""
            with pytest.raises(WireError, match="could not be authenticated"):
                received(moved(announced, token=token))
        assert_whole(received(announced), tmp_path / "came")


def test_a_worker_gives_its_proof_to_no_other_trainer(
    trainer: tuple[TensorServer, Announcement],
) -> None:
    other = TensorServer("127.0.0.1", "gloo")
    with pytest.raises(WireError, match="could not be authenticated"):
        received(moved(trainer[1], port=other.port))
    other.close()


def test_a_byte_that_changed_on_the_way_is_found(
    trainer: tuple[TensorServer, Announcement],
) -> None:
    server, announced = trainer
    assert server._snapshot
    server._snapshot.weights["model-2.safetensors"][-1] ^= 1
    with pytest.raises(
        WireError, match=r"model-2\.safetensors differs from the announced checksum"
    ):
        received(announced)


def test_older_weights_are_not_handed_over_as_the_newest(
    trainer: tuple[TensorServer, Announcement],
) -> None:
    server, announced = trainer
    server.offer(MemorySnapshot.take("l1:8", save, "rolloutmq-test-"))
    with pytest.raises(WireError, match="replaced by newer weights"):
        received(announced)


def test_a_worker_that_hangs_loses_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tensor_server, "MAX_TRANSFERS", 1)
    server = TensorServer("127.0.0.1", "gloo", stall_s=0.5)
    announced = announce(server, MemorySnapshot.take(LABEL, save, "rolloutmq-test-"), tmp_path)
    with Rendezvous.connect("127.0.0.1", server.port, server.token) as rendezvous:
        rendezvous.put("wanted", LABEL.encode())
        assert rendezvous.get("refusal", DEADLINE_S) == b""
        until(lambda: "weights did not reach a worker" in caplog.text)
        server._stall_s = DEADLINE_S
        assert_whole(received(announced), tmp_path / "came")
    server.close()


def test_a_worker_is_killed_in_the_middle_and_the_others_get_all(
    trainer: tuple[TensorServer, Announcement], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-m", "tests.pipeline.handover", "worker"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin
        assert worker.stdout
        print(trainer[1].to_json().decode(), file=worker.stdin, flush=True)
        assert worker.stdout.readline() == "middle\n"
        assert_whole(received(trainer[1]), tmp_path / "beside it")
        worker.kill()
    until(lambda: "weights did not reach a worker" in caplog.text)
    assert_whole(received(trainer[1]), tmp_path / "after it")


def test_a_trainer_is_killed_in_the_middle_and_no_process_waits_for_it() -> None:
    command = [sys.executable, "-m", "tests.pipeline.handover", "trainer"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout
        receiver = TensorReceiver(Announcement.parse(trainer.stdout.readline()), limit_s=DEADLINE_S)
        assert trainer.stdout.readline() == "middle\n"
        assert not receiver.is_done()
        trainer.kill()
    with pytest.raises(WireError, match=r"cut|left"):
        until(receiver.is_done)
    assert not list(receiver.tensors())


# -- through Redis, with a worker ---------------------------------------------


class ReceivingEngine(WatchedEngine):
    """Samples at random, and receives for real. `came`: by version, what and from where."""

    came: dict[PolicyVersion, dict[str, torch.Tensor] | Path]

    def receives_weights(self) -> bool:
        return True

    async def receive_weights(self, announced: Announcement, version: PolicyVersion) -> None:
        try:
            self.came[version] = await asyncio.to_thread(received, announced)
        except WireError as error:
            raise WeightsError(str(error)) from error
        self._swaps.append((self._clock(), version))

    async def load_weights(self, path: Path, version: PolicyVersion) -> None:
        await super().load_weights(path, version)
        self.came[version] = path


@pytest.fixture
def transfer(yard: Yard, tmp_path: Path) -> Iterator[TransferSender]:
    transfer = TransferSender(
        yard.run.store, yard.run.keys, FolderSender(tmp_path / "published"), "gloo", keep=2
    )
    yield transfer
    transfer.close()


def publish(yard: Yard, transfer: TransferSender, version: int) -> PolicyVersion:
    weights = PolicyVersion(LINEAGE, version)
    path, checksum = transfer.write(weights, save)
    assert path == f"{OFFERED}{weights}"
    yard.run.control.publish_weights(yard.trainer, weights, path, checksum)
    transfer.prune()
    return weights


def make_engine(yard: Yard) -> ReceivingEngine:
    engine = ReceivingEngine(yard.worker().engine._config, FIRST)  # type: ignore[attr-defined]
    engine.came = {}
    return engine


async def test_a_worker_takes_each_version_from_memory_and_who_comes_late_the_newest(
    yard: Yard, transfer: TransferSender, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_engine(yard)
    late = make_engine(yard)
    async with yard.working(yard.worker(engine=first)):
        for version in (1, 2, 3):
            weights = await asyncio.to_thread(publish, yard, transfer, version)
            await yard.until(lambda: first.version() == weights)  # noqa: B023
        async with yard.working(yard.worker("w1", engine=late)):
            await yard.until(lambda: late.version() == weights)
    assert [weights.version for weights in first.came] == [1, 2, 3]
    assert [weights.version for weights in late.came] == [3]
    for number, came in enumerate((*first.came.values(), *late.came.values())):
        assert isinstance(came, dict)
        assert_whole(came, tmp_path / str(number))
    assert {key.decode() for key in yard.store.control.lrange(yard.run.keys.weights, 0, -1)} == {
        "l1:2",
        "l1:3",
    }


async def test_who_comes_after_the_trainer_died_finds_the_folder_and_the_next_trainer_goes_on(
    yard: Yard, transfer: TransferSender, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Announce weights of a trainer that died before it wrote its folder.

    The worker keeps its weights, logs that, and waits for the next.
    """
    late = make_engine(yard)
    second = publish(yard, transfer, 2)
    transfer.close()
    reborn = TransferSender(
        yard.run.store, yard.run.keys, FolderSender(tmp_path / "published"), "gloo", keep=2
    )
    reborn.clear()
    async with yard.working(yard.worker(engine=late)):
        await yard.until(lambda: late.version() == second)
        lost = PolicyVersion(LINEAGE, 3)
        gone = replace(_announced(yard), label=str(lost), folder=str(tmp_path / "never written"))
        address = VersionStore(yard.store, yard.run.keys).announce(gone)
        await asyncio.to_thread(yard.run.control.publish_weights, yard.trainer, lost, *address)
        await yard.until(lambda: f"weights refused, staying on {second}" in caplog.text)
        assert late.version() == second
        fourth = await asyncio.to_thread(publish, yard, reborn, 4)
        await yard.until(lambda: late.version() == fourth)
    reborn.close()
    assert late.came[second] == tmp_path / "published" / "l1-000002"
    assert isinstance(late.came[PolicyVersion(LINEAGE, 4)], dict)
    weights_manifest.verify(tmp_path / "published" / "l1-000004", _announced(yard).checksum)


def test_an_announcement_that_is_not_the_published_one_is_refused(
    yard: Yard, transfer: TransferSender
) -> None:
    publish(yard, transfer, 1)
    receiver = WeightsReceiver(yard.store, yard.run.keys)
    checksum = yard.run.control.state().weights_checksum
    with pytest.raises(WireError, match="the manifest has checksum"):
        receiver.announcement(PublishedWeights(f"{OFFERED}l1:1", "0" * 32))
    with pytest.raises(WireError, match="the server has no weights l1:9"):
        receiver.announcement(PublishedWeights(f"{OFFERED}l1:9", checksum))
    for strange in (b"", b"[]", b'{"offer": {"files": 1}}'):
        with pytest.raises(WireError, match="not an announcement of weights"):
            Announcement.parse(strange)


@pytest.mark.parametrize("name", [name for name in get_args(TransportName) if name != "nccl"])
def test_what_a_transport_sends_the_registry_finds_by_its_address(
    yard: Yard, tmp_path: Path, name: TransportName
) -> None:
    """nccl needs two GPUs; it differs from gloo in the exchange of tensors only."""
    sender = open_sender(name, yard.store, yard.run.keys, tmp_path / "published", keep=1)
    older = sender.write(PolicyVersion(LINEAGE, 1), save)
    newer = sender.write(PolicyVersion(LINEAGE, 2), save)
    sender.close()  # what is sent from memory is on disk then
    sender.prune()
    receiver = WeightsReceiver(yard.store, yard.run.keys)
    with closing(receiver):
        assert_whole(written_in(receiver.fetch(newer)), tmp_path / "wanted")
        with pytest.raises((WireError, OSError)):
            receiver.fetch(older)
        with pytest.raises(WireError, match="the manifest has checksum"):
            receiver.fetch(newer._replace(checksum="0" * 32))


def _announced(yard: Yard) -> Announcement:
    """Return the newest weights that were published."""
    state = yard.run.control.state()
    published = PublishedWeights(state.weights_path, state.weights_checksum)
    announced = WeightsReceiver(yard.store, yard.run.keys).announcement(published)
    assert announced
    return announced
