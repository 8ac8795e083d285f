"""A story for each invariant that the scripts enforce.

`make model-check` requires that each story fails without the line that enforces its invariant
(proofs/model_check/mutations.jsonl). I9 (the version stamp is the truth) is mostly the engine's; what
scripts add is that a group is as old as its oldest token. I14 (scripts never read payloads) is
enforced by what is not there: a static test finds a line that is put in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import pytest

from buffer.limits import RunLimits
from buffer.redis.scripts import assemble, sources
from buffer.redis.store import Store
from proofs.model_check.mutation import read_mutations
from tests.buffer.invariants import batches, byte_count, kept_turns, one_place, running
from tests.buffer.redis.test_scripts import reads_of_payloads
from tests.buffer.scene import LIMITS, Scene
from tests.servers import start_server

_numbers = count(1)
STORIES = {(one.story, str(one.limits)): one for one in read_mutations() if one.story}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with (
        start_server("valkey", tmp_path_factory.mktemp("stories")) as server,
        server.connect() as client,
    ):
        client.url = server.url
        yield client


@pytest.fixture
def store(raw: Any) -> Iterator[Store]:
    store = Store(raw.url, deadline_s=2.0)
    yield store
    store.close()


def tell(story: str, limits: Mapping[str, Any], store: Store, raw: Any) -> None:
    (found,) = {
        getattr(module, story)
        for module in (batches, byte_count, kept_turns, one_place, running)
        if hasattr(module, story)
    }
    made = RunLimits(**{**LIMITS.model_dump(), **limits})
    found(Scene(store, raw, f"story-{next(_numbers)}", made))


@pytest.mark.parametrize(("story", "limits"), [(one.story, one.limits) for one in STORIES.values()])
def test_story_holds(story: str, limits: dict[str, Any], store: Store, raw: Any) -> None:
    tell(story, limits, store, raw)


def test_every_invariant_of_the_scripts_has_a_story() -> None:
    assert {one.invariant for one in STORIES.values()} == {f"I{n}" for n in range(1, 14)}


@pytest.mark.parametrize(
    "read",
    [
        "redis.call('GET', KEYS[15])",
        "redis.call('MGET', unpack(KEYS))",
        "redis.call('GETRANGE', KEYS[i], 0, 9)",
    ],
)
def test_reading_a_payload_is_noticed(read: str) -> None:
    texts = sources()
    assert not reads_of_payloads(assemble(texts)["submit"].source)
    line = "local found = seen_bytes(payloads, first, one.chunks)\n"
    texts["submit"] = texts["submit"].replace(line, f"{line}local bytes_read = {read}\n")
    assert reads_of_payloads(assemble(texts)["submit"].source)
