"""All pause and continue at once, a trainer dies in its pause, hints are late, a line is down.

One property, on a real server, with clients on threads of their own: whatever the order, an abort
or drain that is confirmed holds nothing, the run can be continued, and each rollout is made once,
as a whole, from tokens that are kept (I2, I9, I10).
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from buffer.control.control import ControlState, Mode
from buffer.errors import Fenced
from buffer.wire.rollout import RolloutState
from consumer.handle.rollout_consumer import RolloutConsumer
from producer_workers.worker.control_client import ControlClient
from tests.pipeline.yard import TASK, Yard

LENGTHS = (10, 60)
"""Tokens of the two rollouts of each group: the short one is often completed when the long one is
interrupted.
"""

GROUPS = 16
MOVES = 9
PROMPT = 3


class Racers:
    """Who moves at random; `errors` of their threads are the test's."""

    def __init__(self, yard: Yard, seed: int) -> None:
        self.yard = yard
        self._control = yard.run.control
        self._receipts = yard.run.receipts
        self._seed = seed
        self.kept: dict[tuple[str, int], RolloutState] = {}
        self.judged: Counter[tuple[str, int]] = Counter()
        self.errors: list[BaseException] = []
        self.is_over = threading.Event()
        self._hints: list[bytes] = []
        self._lock = threading.Lock()

    def judge(self, *, response: str, ground_truth: str, state: RolloutState) -> float:
        with self._lock:
            self.judged[ground_truth, state.index] += 1
        return 1.0

    def run(self, *moves: Callable[[random.Random], None]) -> None:
        threads = [
            threading.Thread(target=self._guard, args=(move, n)) for n, move in enumerate(moves)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _guard(self, move: Callable[[random.Random], None], number: int) -> None:
        try:
            move(random.Random(10 * self._seed + number))
        except BaseException as error:
            self.errors.append(error)

    # -- who moves -----------------------------------------------------------

    def operate(self, chance: random.Random) -> None:
        for _ in range(MOVES):
            mode = chance.choice([Mode.ABORT, Mode.DRAIN, Mode.KEEP, Mode.RUN, Mode.RUN])
            state = self._control.set_mode("operator", mode)
            if chance.random() < 0.5:
                self._receipts.wait(state, timeout_s=400.0)
                self.look(state)
            time.sleep(chance.uniform(0, 0.1))
        self._control.set_mode("operator", Mode.RUN)

    def train(self, chance: random.Random) -> None:
        """Publish weights all the time; sometimes die in a pause, and let another one take over."""
        consumer = self.open_trainer()
        for version in range(1, MOVES):
            folder, checksum = self.yard.write_weights(version)
            consumer.pause(chance.choice(["abort", "drain", "keep"]))
            self.look(self._control.state())
            if chance.random() < 0.4:
                consumer.role.ended.set()  # no heartbeat any more, and the role is not given up
                dead = consumer
                consumer = self.open_trainer()
                with pytest.raises(Fenced):
                    dead.continue_()
            consumer.publish_weights(version, str(folder), checksum)
            consumer.continue_()
            time.sleep(chance.uniform(0, 0.1))
        consumer.close()

    def open_trainer(self) -> RolloutConsumer:
        consumer = RolloutConsumer(self.yard.run)
        consumer.open(take_over=True)
        return consumer

    def produce(self, _: random.Random) -> None:
        """Reissue aborted groups whenever that is allowed."""
        while not self.is_over.wait(0.02):
            self.yard.reissue()

    def gossip(self, chance: random.Random) -> None:
        """Repeat hints of the channel: late, twice, and in another order."""
        channel = self.yard.run.store.client.pubsub()
        channel.subscribe(self.yard.run.keys.control)
        while not self.is_over.is_set():
            message = channel.get_message(ignore_subscribe_messages=True, timeout=0.02)
            if message:
                self._hints.append(message["data"])
            if self._hints and chance.random() < 0.5:
                # drops its own copy, which would be repeated for ever
                self.yard.run.store.client.publish(self.yard.run.keys.control, self._hints.pop(0))
                channel.get_message(ignore_subscribe_messages=True, timeout=0.02)
        channel.close()

    # -- what must be so -----------------------------------------------------

    def look(self, state: ControlState) -> None:
        """Check that nothing is held, and that tokens are kept, once all have confirmed `state`.

        Nothing is checked if the control state has changed again.
        """
        if state.mode not in (Mode.ABORT, Mode.DRAIN) or self._receipts.silent(state.epoch):
            return
        leases = self.yard.leases()
        aborted = self.yard.run.buffer.get(GROUPS, TASK, "aborted")
        if self._control.state().epoch != state.epoch:
            return
        assert leases == 0
        for group in aborted:
            for rollout in group.states:
                self.kept[group.gid, rollout.index] = rollout


@pytest.mark.parametrize("seed", range(2))
async def test_pauses_may_race_and_every_rollout_is_made_once_and_as_a_whole(
    make_yard: Callable[..., Yard], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    listen = ControlClient.listen
    monkeypatch.setattr(
        ControlClient,
        "listen",
        lambda client: (
            asyncio.Event().wait() if client._worker == "disconnected" else listen(client)
        ),
    )
    yard = make_yard(lease_ms=60_000, heartbeat_ms=100)
    racers = Racers(yard, seed)
    gids = yard.enqueue(GROUPS, LENGTHS)
    requests: list[tuple[str, int, Any]] = []
    options: dict[str, Any] = {"token_s": 0.004, "partial_rollout": True, "judge": racers.judge}
    workers = [yard.worker(name, **options) for name in ("w0", "w1", "disconnected")]
    async with (
        yard.working(workers[0]) as a,
        yard.working(workers[1]) as b,
        yard.working(workers[2]) as c,
    ):
        others = [asyncio.to_thread(racers.run, other) for other in (racers.produce, racers.gossip)]
        background = asyncio.gather(*others)
        try:
            # one that is certain to interrupt something, for the races to begin with
            await yard.until(lambda: yard.leases() > 0)
            await yard.receipts(yard.control(Mode.ABORT))
            await asyncio.to_thread(racers.run, racers.operate, racers.train)
            await yard.receipts(yard.run.control.state())
            await yard.until_stages(completed=GROUPS)
        finally:
            racers.is_over.set()
            await background
        requests.extend([*a.requests, *b.requests, *c.requests])
    for gid in gids:
        group = yard.group(gid)
        assert group.lengths.tolist() == list(LENGTHS)
        for state in group.states:
            versions = [span.version for span in state.spans]
            assert versions == sorted(versions)
            assert (
                sum(span.length for span in state.spans)
                == len(state.response_ids)
                == len(state.logprobs)
            )
            if (before := racers.kept.get((gid, state.index))) is not None:
                made = len(before.response_ids)
                assert np.array_equal(state.response_ids[:made], before.response_ids)
                assert np.array_equal(state.logprobs[:made], before.logprobs)
    for request_id, prompt, params in requests:
        # a budget is for the whole response: what is there is subtracted, and what is whole is not
        # asked for
        assert params.max_tokens == LENGTHS[int(request_id.split("/")[1])] - (prompt - PROMPT) > 0
    assert set(racers.judged.values()) == {1}
    assert len(racers.judged) == GROUPS * len(LENGTHS)
    assert yard.counters().get("failed", 0) == yard.counters().get("leases_lost", 0) == 0
    assert int(yard.run.progress(TASK)["produced_tokens"]) == GROUPS * sum(LENGTHS)
    yard.check()
