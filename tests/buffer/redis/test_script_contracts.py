"""Every script refuses what its header does not allow, whoever calls it, and changes nothing then.

Nothing here knows a script: whatever has a header is tried, in a run in which every script has
something to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer.limits import RunLimits
from buffer.redis.scripts import library
from tests.buffer.hostile_store import HostileStore, bad_values, fits
from tests.buffer.scene import LIMITS, Scene
from tests.buffer.whole_story import tell_a_whole_story
from tests.servers import start_server


@pytest.fixture(scope="module", params=["valkey", "redis"])
def hostile(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostileStore]:
    folder: Path = tmp_path_factory.mktemp("hostile")
    with start_server(request.param, folder / "server") as server, server.connect() as raw:
        store = HostileStore(server.url, raw, "hostile")
        limits = RunLimits(
            **{**LIMITS.model_dump(), "max_tries": 2, "on_straggler": "retry", "order": "fifo"}
        )
        scene = Scene(store, raw, "hostile", limits)
        tell_a_whole_story(scene, folder)
        scene.run.buffer.count_statuses("math")
        scene.run.buffer.get(1, "math")
        store.call("sync", scene.keys.slots(), {})
        scene.check()
        yield store
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(library()))
def test_script_refuses_whatever_its_header_does_not_allow(
    hostile: HostileStore, name: str
) -> None:
    assert hostile.tried[name]
    assert hostile.faults[name] == []


def test_good_values_are_good_and_bad_ones_are_bad() -> None:
    for kind, value in [
        ("0..9", b"9"),
        ("''|token", b""),
        ("text..3", "é".encode()),
        ("a|b", b"b"),
        ("lanes", b"eval fresh"),
    ]:
        assert fits(kind, value)
    assert {b"-1", b"10", b"", b"1.5"} <= set(bad_values("0..9"))
    assert b"x" * 4 in set(bad_values("text..3"))


MANIFESTS = ("'LRANGE', batch, 0, -1", "'LRANGE', batch, 1, -1")
"""Whole manifests: TOO_MANY bounds them when they are made."""


@pytest.mark.parametrize("name", sorted(library()))
def test_no_script_reads_more_than_a_bound(name: str) -> None:
    code = re.sub(r"--.*", "", library()[name].source)
    for read in re.findall(r"'(?:LRANGE|SRANDMEMBER|X(?:REV)?RANGE|Z(?:REV)?RANGE\w*)'.*", code):
        is_bounded = re.search(
            r"limit|LIMIT|COUNT|count|start \+ 499|, -\d+, -1|entry, entry|LLEN", read
        )
        assert is_bounded or read.startswith(MANIFESTS), f"{name}: {read}"
