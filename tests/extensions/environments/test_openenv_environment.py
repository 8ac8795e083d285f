from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from buffer.errors import Skip
from buffer.wire.rollout import RolloutState, Status
from buffer.wire.sampling import SampleParams
from producer_workers.agent_loops.agent_loop import load_agent_loop
from producer_workers.config.task import TaskSection
from producer_workers.datasets.open import open_dataset
from producer_workers.engines.base import Generation
from tests.producer_workers.recorder import Recorder

pytest.importorskip("openenv")

ROOT = Path(__file__).parents[3]

HALVES = ["I say 50", "25", "12", "6", "3", "1"]


def as_action(text: str, observation: dict[str, Any]) -> dict[str, Any]:
    return {"message": f"{len(observation)} 99 {text}"}


def as_chat(observation: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": observation["text"]}]


class Server:
    def __init__(self, module: str = "examples.openenv_numbers") -> None:
        self.module = module
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", self.module, str(self.port)]
        self.process = subprocess.Popen(command, cwd=ROOT)
        for _ in range(600):
            assert self.process.poll() is None
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=1):
                return
            time.sleep(0.1)
        raise AssertionError("the server does not answer")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


TURN: ContextVar[int] = ContextVar("TURN")


class Halves(list[str]):
    """What is said next depends on the turn of the session that asks."""

    def __getitem__(self, _: Any) -> Any:
        return HALVES[TURN.get()]


class Scripted(Recorder):
    """Plays the same turns in every session; does something before one of them."""

    def __init__(self, tokenizer: Any, before: tuple[int, Callable[[], None]] | None) -> None:
        super().__init__(tokenizer, Halves())
        self.before = before
        self.turns = Counter[str]()

    async def generate(self, request_id: str, prompt_ids: Any, params: Any) -> Generation:
        session = request_id.split("/")[1]
        TURN.set(self.turns[session])
        self.turns[session] += 1
        if self.before and self.before[0] == TURN.get():
            await asyncio.to_thread(self.before[1])
        return await super().generate(request_id, prompt_ids, params)


def play(
    chat: Any,
    server: Server,
    limits: Sequence[int] = (4096,),
    before: tuple[int, Callable[[], None]] | None = None,
    cut: bool = False,
    first: int = 7,
    **options: Any,
) -> tuple[list[RolloutState], Scripted]:
    """Play episodes 7, 8 ..., each with a limit of tokens; if `cut`, interrupted and resumed."""
    dataset = {"kind": "openenv", "url": server.url, "size": 100, "first": first}
    section = TaskSection.model_validate(
        {"judge": "environment", "dataset": dataset, "agent_loop_options": options}
    )
    rows = open_dataset(section.dataset, Path())
    loop: Any = load_agent_loop(
        section.loop("single_turn"),
        judge=None,
        tokenizer=chat,
        eos_ids=[chat.eos_token_id],
        partial_rollout=cut,
        options=section.loop_options("openenv"),
    )
    states = [
        RolloutState(
            index=index,
            messages=rows.row(index).messages,
            extra=rows.row(index).extra,
            sample_params=SampleParams(max_tokens=limit),
        )
        for index, limit in enumerate(limits)
    ]
    engine = Scripted(chat, before)

    async def scene() -> list[RolloutState]:
        made: list[RolloutState] = states
        try:
            if cut:
                engine.cut = {*range(len(limits))}
                made = await loop.generate_group(made, engine, "math-0000000001")
                assert {state.status for state in made} == {Status.ABORTED}
                engine.cut = set()
                for session in engine.turns:
                    engine.turns[session] -= 1  # the turn that was cut is asked again
            made = await loop.generate_group(made, engine, "math-0000000001")
        finally:
            await loop.close()
        return made

    return asyncio.run(scene()), engine


def expected(seed: int) -> list[float]:
    """The rewards of HALVES, by the example's own code in this process."""
    from examples.openenv_numbers import Guess, Numbers

    game = Numbers()
    game.reset(seed=seed)
    rewards = []
    for said in HALVES:
        hint = game.step(Guess(message=said))
        rewards.append(float(hint.reward))
        if hint.done:
            break
    return rewards


def test_an_episode_is_trained_with_the_rewards_of_its_steps(chat: Any, server: Server) -> None:
    states, engine = play(chat, server, [4096, 4096, 4096, 14], turn_rewards=True)
    assert [state.error for state in states] == [None] * 4
    engine.check(states)
    wanted = [*map(expected, (7, 8, 9)), [expected(10)[0], 0.0]]  # the last one's tokens end
    for state, rewards in zip(states, wanted, strict=True):
        assert state.reward == pytest.approx({"score": sum(rewards)})
        assert state.token_rewards is not None
        given = [float(state.token_rewards[turn].sum()) for turn in state.turns()]
        assert given == pytest.approx(rewards)
        assert state.prompt_ids is not None
        assert "Guess my number" in chat.decode(state.prompt_ids)


def test_functions_make_actions_and_a_limit_of_turns_ends_an_episode(
    chat: Any, server: Server
) -> None:
    (state,), _ = play(chat, server, action=f"{__name__}:as_action", max_turns=2)
    assert state.reward == pytest.approx({"score": sum(expected(7)[:2])})
    assert state.token_rewards is None


def test_an_interrupted_episode_takes_its_actions_again(chat: Any, server: Server) -> None:
    states, engine = play(chat, server, cut=True, resumable=True, turn_rewards=True)
    assert [state.reward for state in states] == [pytest.approx({"score": sum(expected(7))})]
    assert len(engine.said) == len(expected(7)), "no finished turn was sampled again"
    engine.check(states)


def test_an_episode_begins_with_the_messages_of_its_observation(chat: Any, server: Server) -> None:
    (state,), _ = play(chat, server, observation=f"{__name__}:as_chat", max_turns=2)
    (told,), _ = play(chat, server, max_turns=2)
    assert state.prompt_ids is not None
    assert told.prompt_ids is not None
    assert state.prompt_ids.tolist() == told.prompt_ids.tolist()


def test_a_server_that_is_away_is_waited_for_and_fails_no_episode(
    chat: Any, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def serve_busy() -> None:
        with socket.create_server(("127.0.0.1", server.port)) as listener:
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
            connection.close()

    def return_when_missed() -> None:
        serve_busy()
        while "rollouts wait" not in caplog.text:
            time.sleep(0.05)
        server.start()

    caplog.set_level(logging.WARNING)
    server.stop()
    returning = threading.Thread(target=return_when_missed)
    returning.start()
    states, engine = play(chat, server, [4096, 4096])
    returning.join()
    assert [state.error for state in states] == [None] * 2
    assert "rollouts wait" in caplog.text
    engine.check(states)


@pytest.mark.parametrize("first", [6, 7])
def test_an_environment_skips_its_example_at_the_reset_or_later(chat: Any, first: int) -> None:
    server = Server("tests.extensions.environments.openenv_pages")
    try:
        with pytest.raises(Skip, match="the page is gone"):
            play(chat, server, first=first)
    finally:
        server.stop()


def test_faults_of_an_environment_fail_the_episode(chat: Any, server: Server) -> None:
    def restart() -> None:
        server.stop()
        server.start()

    (state,), _ = play(chat, server, before=(2, restart))
    assert state.status is Status.FAILED
    assert "broke" in str(state.error)
    (wrong,), _ = play(chat, server, observation="no_such_field")
    assert wrong.status is Status.FAILED
    assert "no_such_field" in str(wrong.error)
