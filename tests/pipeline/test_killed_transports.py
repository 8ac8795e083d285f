from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from safetensors.numpy import load_file

from buffer.errors import WireError
from buffer.weights.transport import PublishedWeights, TransportName
from buffer.weights.transports import WeightsReceiver, open_sender
from buffer.wire.rollout import PolicyVersion
from tests.pipeline.weights_process import LINEAGE, save, words
from tests.pipeline.yard import Yard


def lines_until_killed(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "tests.pipeline.weights_process", *arguments]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        while (line := process.stdout.readline()) != "middle\n":
            assert line, "the process ended before the middle"
            lines.append(line)
        process.kill()
    return lines


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def is_whole(folder: Path, version: int) -> bool:
    found = load_file(folder / "model.safetensors")["w"].view(np.uint16)
    return np.array_equal(found, words(version))


@pytest.mark.parametrize(
    ("transport", "delta_base_every"),
    [
        pytest.param("folder", 1, marks=pytest.mark.slow),
        pytest.param("redis", 1, marks=pytest.mark.slow),
        ("redis", 4),
    ],
)
def test_a_process_that_is_killed_in_the_middle_leaves_whole_versions_and_nothing_else(
    yard: Yard,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transport: TransportName,
    delta_base_every: int,
) -> None:
    home, folder = tmp_path / "home", tmp_path / "published"
    home.mkdir()
    monkeypatch.setenv("TMPDIR", str(home))
    monkeypatch.setattr(tempfile, "tempdir", None)
    store, keys = yard.store, yard.run.keys
    run = (transport, str(delta_base_every), store.servers.url_of(keys.control), yard.run.name)
    first = PublishedWeights(*lines_until_killed("sender", *run, str(folder))[0].split())
    with closing(WeightsReceiver(store, keys)) as worker:
        assert is_whole(worker.fetch(first), 1)
        with pytest.raises((WireError, OSError)):
            worker.check(first._replace(address=first.address[:-1] + "2"))
    sender = open_sender(transport, store, keys, folder, keep=3, delta_base_every=delta_base_every)
    sender.clear()
    assert not files_in(home)
    assert {path.name for path in folder.glob("*")} <= {"l1-000001"}
    assert yard.store.client.exists(*(keys.weights_part(f"{LINEAGE}:2", n) for n in range(9))) == 0
    for version in (2, 3):
        published = sender.write(PolicyVersion(LINEAGE, version), save(version))
    lines_until_killed("receiver", *run, *published)
    with closing(WeightsReceiver(store, keys)) as worker:
        assert is_whole(worker.fetch(published), 3)
    sender.close()
    assert not files_in(home)


@pytest.mark.parametrize("transport", get_args(TransportName))
def test_a_receiver_finds_a_version_by_its_address_and_refuses_another(
    yard: Yard, tmp_path: Path, transport: TransportName
) -> None:
    sender = open_sender(transport, yard.store, yard.run.keys, tmp_path / "published", keep=1)
    older, newer = (sender.write(PolicyVersion(LINEAGE, n), save(n)) for n in (1, 2))
    sender.prune()
    with closing(WeightsReceiver(yard.store, yard.run.keys)) as receiver:
        assert is_whole(receiver.fetch(newer), 2)
        with pytest.raises((WireError, OSError)):
            receiver.fetch(older)
        with pytest.raises(WireError, match="the manifest has checksum"):
            receiver.fetch(newer._replace(checksum="0" * 32))
