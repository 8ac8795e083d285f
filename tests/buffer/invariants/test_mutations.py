"""Tests of the tests: without a line that enforces an invariant, the story of that invariant fails.

I9 (the version stamp is the truth) is mostly the engine's (tests/producer_workers/engines,
tests/pipeline); what scripts add is that a group is as old as its oldest token. I14 (scripts never
read payloads) is enforced by what is not there, so its mutation puts a line in; what finds it is
the static test in tests/buffer/redis/test_scripts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from buffer.errors import RolloutMQError
from buffer.model.limits import RunLimits
from buffer.redis.store import Store
from tests.buffer.invariants.batch_mutations import BATCHES
from tests.buffer.invariants.byte_count_mutations import BYTE_COUNT
from tests.buffer.invariants.mutation import Mutation, Story
from tests.buffer.invariants.one_place_mutations import ONE_PLACE
from tests.buffer.invariants.running_mutations import RUNNING
from tests.buffer.redis.test_scripts import reads_of_payloads
from tests.buffer.scene import LIMITS, Scene
from tests.servers import start_server

_numbers = count(1)
MUTATIONS = [*ONE_PLACE, *BATCHES, *RUNNING, *BYTE_COUNT]
ORIGINALS = {(mutation.story, str(mutation.limits)): mutation for mutation in MUTATIONS}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with (
        start_server("valkey", tmp_path_factory.mktemp("mutations")) as server,
        server.connect() as client,
    ):
        client.url = server.url
        yield client


@pytest.fixture
def store(raw: Any) -> Iterator[Store]:
    store = Store(raw.url, deadline_s=2.0)
    yield store
    store.close()


def tell(mutation: Mutation, store: Store, raw: Any) -> None:
    story: Story = mutation.story
    limits = RunLimits(**{**LIMITS.model_dump(), **mutation.limits})
    story(Scene(store, raw, f"mutation-{next(_numbers)}", limits))


@pytest.mark.parametrize("mutation", ORIGINALS.values(), ids=str)
def test_story_holds(mutation: Mutation, store: Store, raw: Any) -> None:
    tell(mutation, store, raw)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_story_fails_without_the_line_that_enforces_it(
    mutation: Mutation, store: Store, raw: Any
) -> None:
    store.scripts = mutation.scripts()
    raw.script_load(store.scripts.get(mutation.file, store.scripts["claim"]).source)
    with pytest.raises((AssertionError, RolloutMQError, pytest.fail.Exception)) as caught:
        tell(mutation, store, raw)
    # a script that only crashes has not been noticed by the story
    assert "user_script" not in str(caught.value), "the mutated script is no Lua that runs"


def test_every_invariant_of_the_scripts_has_mutations() -> None:
    assert {mutation.invariant for mutation in MUTATIONS} == {
        f"I{number}" for number in range(1, 14)
    }


@pytest.mark.parametrize(
    "read",
    [
        "redis.call('GET', KEYS[15])",
        "redis.call('MGET', unpack(KEYS))",
        "redis.call('GETRANGE', KEYS[i], 0, 9)",
    ],
)
def test_reading_a_payload_is_noticed(read: str) -> None:
    line = "local found = seen_bytes(payloads, 0, chunks, size)\n"
    mutation = Mutation(
        "I14", "submit", line, lambda _: None, new=f"{line}local bytes_read = {read}\n"
    )
    assert reads_of_payloads(mutation.scripts()["submit"].source)
    assert not reads_of_payloads(
        Mutation("I14", "submit", line, lambda _: None, new=line).scripts()["submit"].source
    )
