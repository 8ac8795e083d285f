from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buffer.job import PayloadRef
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from tests.buffer.scene import Scene

SIZES = [0.1, 0.4, 1.2, 1.3, 2, 2.6, 4.1, 5, 5.3, 9, 20]
"""Megabytes of groups, with several of each."""

COPIES = 2


def _group(gid: str, megabytes: float) -> RolloutGroup:
    """Two rollouts, every column of which has values of its own."""
    rng = np.random.default_rng(int(gid[-10:]))
    tokens = int(megabytes * 1e6) // 24
    states = [
        RolloutState(
            index=index,
            prompt_ids=np.arange(tokens, dtype="<i4") + int(gid[-10:]),
            response_ids=rng.integers(0, 150_000, tokens).astype("<i4"),
            logprobs=-rng.random(tokens).astype("<f4"),
            spans=[VersionSpan(0, tokens, 0, "l0")],
            status=Status.COMPLETED,
            reward={"score": rng.random()},
        )
        for index in range(2)
    ]
    return RolloutGroup(gid, "math", states)


class _Stored:
    """Groups on a server, and what their columns must be."""

    def __init__(self, scene: Scene) -> None:
        self._read = scene.run.buffer.read_many
        self.columns: dict[str, dict[str, bytes]] = {}
        self.refs: list[PayloadRef] = []
        for position, size in enumerate(SIZES * COPIES):
            group = _group(f"math-{position:010d}", size)
            self.columns[group.gid] = _bytes(group)
            self.refs.append(scene.run.payloads.write(group.gid, "t", group_bytes.encode(group)))

    def read_and_drop(
        self, steps: int, choose: Callable[[list[PayloadRef]], list[PayloadRef]]
    ) -> set[str]:
        """Read chosen groups again and again, hold some of them; return the gids that changed."""
        held: list[RolloutGroup] = []
        wrong: set[str] = set()
        for step in range(steps):
            held = held[step % 2 :: 2] + self._read(choose(self.refs))
            wrong |= {g.gid for g in held if _bytes(g) != self.columns[g.gid]}
        return wrong


def _bytes(group: RolloutGroup) -> dict[str, bytes]:
    return {name: column.tobytes() for name, column in group.columns.items()}


def test_no_group_changes_while_others_are_read(scene: Scene) -> None:
    stored = _Stored(scene)

    # the server keeps what it holds: the examples only read
    @settings(
        max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(
        st.lists(st.sampled_from(stored.refs), min_size=2, max_size=6, unique=True), st.randoms()
    )
    def check(first: list[PayloadRef], dice: random.Random) -> None:
        chosen = iter([first])
        wrong = stored.read_and_drop(
            4, lambda refs: next(chosen, None) or dice.sample(refs, dice.randint(1, 5))
        )
        assert not wrong

    check()


def test_no_group_changes_while_other_threads_read(scene: Scene) -> None:
    stored = _Stored(scene)

    def read(seed: int) -> set[str]:
        dice = random.Random(seed)
        return stored.read_and_drop(6, lambda refs: dice.sample(refs, dice.randint(1, 6)))

    with ThreadPoolExecutor(3) as threads:
        assert not set().union(*threads.map(read, range(3)))
