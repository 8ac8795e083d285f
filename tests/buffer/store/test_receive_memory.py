"""Received bytes stay what they are for as long as anything refers to them."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from buffer.store.connection.receive_memory import SLAB_BYTES, receive_memory
from buffer.store.payloads import Upload
from tests.buffer.scene import Scene


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def test_memory_is_used_again_after_its_last_view() -> None:
    memory = receive_memory(SLAB_BYTES)
    address = _address(memory)
    column = np.frombuffer(memory[100:200].toreadonly(), "<i4")[3:]
    del memory
    others = [receive_memory(SLAB_BYTES) for _ in range(3)]
    assert address not in map(_address, others)
    del column
    assert _address(receive_memory(SLAB_BYTES)) == address


@pytest.mark.parametrize("size", [0, 1, 200_000, SLAB_BYTES + 1])
def test_other_sizes_have_memory_of_their_own(size: int) -> None:
    assert receive_memory(size).nbytes == size


def test_bytes_that_are_held_never_change(scene: Scene) -> None:
    dice = random.Random(5)
    data = {f"math-{n:010d}": dice.randbytes(300_000 + n) for n in range(40)}
    refs = scene.run.payloads.write_many([Upload(gid, "t", part) for gid, part in data.items()])

    def read(seed: int) -> None:
        own = random.Random(seed)
        held: list[tuple[str, memoryview | bytes]] = []
        for _ in range(6):
            chosen = own.sample(refs, own.randint(1, len(refs)))
            parts = scene.run.payloads.read_each(
                chosen,
                lambda refs, parts: [
                    (ref.gid, part) for ref, part in zip(refs, parts, strict=True)
                ],
            )
            held = own.sample(held + parts, min(len(parts), own.randint(0, 20)))
            wrong.extend(gid for gid, part in held if part != data[gid])

    wrong: list[str] = []
    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
