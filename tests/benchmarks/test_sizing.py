"""What `rolloutmq simulate --size` says of bytes, against a server."""

from __future__ import annotations

import pytest

from benchmarks import sizing
from benchmarks.server import durable_server
from benchmarks.sizing import measure
from producer_workers.simulation.server_load import HELD_BATCHES, Machine, server_load

GROUPS_A_STEP = 64
PROMPT = 512
SAMPLES = 8


def test_bytes_are_those_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "BYTES_A_ROUND", 20 * 2**20)
    with durable_server() as server:
        # a rewrite of the file would hide what is added to it
        server.raw.config_set("auto-aof-rewrite-percentage", 0)
        measure(server, 64)
        for length in (1024, 4096):
            cost = measure(server, length)
            load = server_load(
                workers=1,
                tokens_per_s=SAMPLES * length,  # a group per second
                samples=SAMPLES,
                prompt=PROMPT,
                response=length,
                batch=GROUPS_A_STEP,
            )
            assert load.groups_per_s == 1
            assert load.group_bytes == pytest.approx(cost.bytes, rel=0.1)
            assert load.received == pytest.approx(cost.received, rel=0.1)
            assert load.sent == pytest.approx(cost.sent, rel=0.1)
            assert load.written / 2 == pytest.approx(cost.appended, rel=0.1)
            held = load.memory / HELD_BATCHES / GROUPS_A_STEP
            # of few groups, connections hold a part
            assert held == pytest.approx(cost.held, rel=0.4)


def test_the_part_that_is_full_first_limits_the_fleet() -> None:
    load = server_load(
        workers=64, tokens_per_s=2500, samples=8, prompt=512, response=2000, batch=64
    )
    roomy = Machine(memory=64e9, network=1.25e9, disk=1e9)
    assert next(iter(load.shares(roomy))) == "processor"
    slow = Machine(memory=64e9, network=load.received / 2, disk=1e9)
    assert next(iter(load.shares(slow))) == "network"
    assert load.most_workers(slow) == 32
