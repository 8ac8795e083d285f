from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest

from buffer.control.control import Mode
from buffer.wire.rollout import RolloutState, Status
from buffer.wire.sampling import SampleParams
from tests.pipeline.live_gateway import live
from tests.pipeline.test_kept_turns import notes, trained
from tests.pipeline.yard import Yard
from tests.waits import DEADLINE_S, end_of, until
from tests.warm_process import start_program

MEMBERS = 2


class Gateways:
    """The gateways of a run, and the requests of an impatient program."""

    def __init__(self, yard: Yard, folder: Path) -> None:
        self.yard = yard
        self.folder = folder
        self.ttl_s = 1000.0
        """of the gateways that are started next"""
        self.running: dict[str, BaseProcess] = {}
        self.http = httpx.Client(timeout=DEADLINE_S)

    def start(self, name: str, death: str = "never") -> str:
        run = self.yard.run.name
        words = (self.yard.store.url, run, name, str(self.folder), str(self.ttl_s), death)
        self.running[name] = start_program(live, *words)
        file = self.folder / name
        until(file.exists, "the URL of a gateway", partial(end_of, self.running[name]))
        return file.read_text()

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join(DEADLINE_S)

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.join()
        self.http.close()

    @property
    def admin(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {(self.folder / 'key').read_text().strip()}"}

    def open(self, url: str) -> Any:
        answer = self.http.post(f"{url}/sessions", headers=self.admin, json={})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def reward(self, url: str, key: str, **reward: Any) -> httpx.Response:
        return self.http.post(f"{url}/sessions/{key}/reward", json=reward)


def ask(url: str, key: str, messages: list[Any]) -> list[Any]:
    """Ask for a turn as any program does; return the conversation with it."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        made = client.chat.completions.create(model="any", messages=messages, max_tokens=8)
    return [*messages, {"role": "assistant", "content": made.choices[0].message.content}]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture
def make_gateways(
    make_yard: Callable[..., Yard], tmp_path: Path
) -> Iterator[Callable[..., Gateways]]:
    made: list[Gateways] = []

    def make() -> Gateways:
        yard = make_yard(max_tries=3)
        params = SampleParams(max_tokens=200, seed=1)
        states = [
            RolloutState(
                index=n, messages=[user("drawn")], prompt_ids=np.arange(3), sample_params=params
            )
            for n in range(MEMBERS)
        ]
        yard.enqueue_states(*[states] * 3)
        made.append(Gateways(yard, tmp_path))
        return made[-1]

    yield make
    for gateways in made:
        gateways.close()


@pytest.mark.parametrize("make_yard", ["valkey"], indirect=True)
def test_a_session_goes_on_at_another_gateway_whenever_its_gateway_is_killed(
    make_gateways: Callable[..., Gateways],
) -> None:
    gateways = make_gateways()
    yard = gateways.yard
    url = gateways.start("g0")
    opened = gateways.open(url)
    assert yard.stages() == {"running": 1, "waiting": 2}, "one is claimed for one program"
    keys = [each["key"] for each in opened["sessions"]]
    assert [each["messages"] for each in opened["sessions"]] == [[user("drawn")]] * MEMBERS
    talks = [[user(f"question {n}")] for n in range(MEMBERS)]
    for turn in range(3):
        with ThreadPoolExecutor() as threads:
            asked = threads.map(ask, [url] * MEMBERS, keys, talks)
            if turn:  # it asks the next gateway while the dead one still has the lease
                time.sleep(0.5)
                yard.expire_lease(f"g{turn - 1}")
            talks = [[*talk, user("and?")] for talk in asked]
        gateways.kill(f"g{turn}")
        url = gateways.start(f"g{turn + 1}")
    yard.expire_lease("g2")
    assert gateways.reward(url, keys[0], score=0.5).json() == {"status": "ended"}
    gateways.kill("g3")
    yard.expire_lease("g3")
    url = gateways.start("g4")
    until(lambda: yard.run.record(opened["group"]).get("owner") == "g4")
    assert gateways.reward(url, keys[0], score=0.5).status_code == 410
    assert gateways.reward(url, keys[1], score=1.0).status_code == 200
    until(lambda: yard.stages() == {"completed": 1, "waiting": 2})
    group = yard.group(opened["group"])
    assert group.status is Status.COMPLETED
    assert [state.reward for state in group.states] == [{"score": 0.5}, {"score": 1.0}]
    turns, sampled = trained(group.states), notes(gateways.folder, "sampled")
    assert len(turns) == 3 * MEMBERS
    assert sorted(turns) == sorted(sampled)
    told = [message["content"] for talk in talks for message in talk[1::2]]
    texts = ["".join(chr(32 + token) for token in ids) for _, ids in turns]
    assert [text.strip() for text in told] == [text.strip() for text in texts]
    yard.check()


@pytest.mark.parametrize("make_yard", ["valkey"], indirect=True)
def test_a_turn_that_is_kept_but_not_answered_is_answered_by_the_next_gateway(
    make_gateways: Callable[..., Gateways],
) -> None:
    gateways = make_gateways()
    url = gateways.start("g0", "kept 3")
    opened = gateways.open(url)
    key, other = (each["key"] for each in opened["sessions"])
    talk = [*ask(url, key, [user("a")]), user("b")]
    ask(url, other, [user("a")])
    with pytest.raises(openai.APIConnectionError):
        ask(url, key, talk)
    url = gateways.start("g1")
    gateways.yard.expire_lease("g0")
    talk = ask(url, key, talk)
    sampled = notes(gateways.folder, "sampled")
    assert len(sampled) == 3, "it was not sampled again"
    text = "".join(chr(32 + token) for token in sampled[-1][1])
    assert talk[-1]["content"].strip() == text.strip()
    ask(url, key, [*talk, user("c")])
    for one in (key, other):
        assert gateways.reward(url, one, score=1.0).status_code == 200
    until(lambda: gateways.yard.stages().get("completed") == 1)
    turns = trained(gateways.yard.group(opened["group"]).states)
    assert sorted(turns) == sorted(notes(gateways.folder, "sampled"))


@pytest.mark.parametrize("make_yard", ["valkey"], indirect=True)
def test_a_session_is_reached_by_any_living_gateway_and_its_responses_by_the_next(
    make_gateways: Callable[..., Gateways],
) -> None:
    gateways = make_gateways()
    first, second = gateways.start("g0"), gateways.start("g1")
    opened = gateways.open(first)
    key, other = (each["key"] for each in opened["sessions"])

    def respond(url: str, key: str, **asked: Any) -> Any:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            if "id" in asked:
                return client.responses.retrieve(asked["id"])
            return client.responses.create(model="any", max_output_tokens=8, **asked)

    made = [respond(first, key, input="a", instructions="be brief")]
    made += [respond(second, key, input="b", previous_response_id=made[0].id)]
    assert len(ask(second, f"{other}:judge/1", [user("a")])) == 2
    ask(second, other, [user("a")])
    answer = gateways.http.post(
        f"{second}/sessions/{other}/reward", json={"score": 1.0}, follow_redirects=True
    )
    assert answer.json() == {"status": "ended"}
    gateways.kill("g0")
    gateways.yard.expire_lease("g0")
    for _ in range(2):
        made += [respond(second, key, input="c", previous_response_id=made[-1].id)]
    made += [respond(second, key, input="d", previous_response_id=made[0].id)]
    for response in made:
        found = respond(second, key, id=response.id)
        assert (found.output, found.status) == (response.output, response.status)
        assert found.usage == response.usage
    with pytest.raises(openai.NotFoundError):
        respond(second, key, id="resp_of_another")
    assert gateways.reward(second, key, score=1.0).status_code == 200
    until(lambda: gateways.yard.stages().get("completed") == 1)
    turns = trained(gateways.yard.group(opened["group"]).states)
    assert sorted(turns) == sorted(notes(gateways.folder, "sampled"))
    assert len(turns) == 7


@pytest.mark.parametrize("make_yard", ["valkey"], indirect=True)
def test_a_program_skips_the_group_of_its_session_also_at_another_gateway(
    make_gateways: Callable[..., Gateways],
) -> None:
    gateways = make_gateways()
    yard = gateways.yard
    first, second = gateways.start("g0"), gateways.start("g1")
    opened = gateways.open(first)
    key, other = (each["key"] for each in opened["sessions"])
    where = f"{second}/sessions/{key}/reward"
    said = gateways.http.post(where, json={"skip": "the page is gone"}, follow_redirects=True)
    assert said.json() == {"status": "ended"}
    (letter,) = yard.run.skips.newest()
    assert (letter.gid, letter.reason) == (opened["group"], "the page is gone")
    assert yard.stages() == {"skipped": 1, "waiting": 2}
    for one, reward in ((key, {"skip": "again"}), (other, {"score": 1.0})):
        assert gateways.reward(first, one, **reward).status_code == 410
    yard.check()


@pytest.mark.parametrize("make_yard", ["valkey"], indirect=True)
def test_a_reward_counts_once_and_a_session_without_one_is_dropped(
    make_gateways: Callable[..., Gateways],
) -> None:
    gateways = make_gateways()
    yard = gateways.yard
    url = gateways.start("g0")
    opened = gateways.open(url)
    first, second = (each["key"] for each in opened["sessions"])
    assert gateways.reward(url, first, score=1.0).status_code == 409, "nothing was said"
    ask(url, first, [user("a")])
    ask(url, second, [user("a")])
    assert gateways.reward(url, first, score="high").status_code == 400
    assert gateways.reward(url, first, score=1.0, turn_rewards=[1.0, 2.0]).status_code == 400
    assert gateways.reward(url, first, score=1.0).status_code == 200
    assert gateways.reward(url, first, score=1.0).status_code == 200
    assert gateways.reward(url, first, score=0.0).status_code == 409
    gateways.kill("g0")
    gateways.ttl_s = 1.0
    url = gateways.start("g1")
    yard.expire_lease("g0")
    until(lambda: yard.stages().get("dropped") == 1)
    assert gateways.reward(url, second, score=1.0).status_code == 410
    with pytest.raises(openai.APIStatusError) as error:
        ask(url, second, [user("b")])
    assert error.value.status_code == 410
    yard.check()
    again = gateways.open(url)
    assert again["group"] != opened["group"]


@pytest.mark.parametrize("make_yard", ["valkey"], indirect=True)
def test_a_pause_delays_a_program_and_strangers_learn_nothing(
    make_gateways: Callable[..., Gateways],
) -> None:
    gateways = make_gateways()
    yard = gateways.yard
    url = gateways.start("g0")
    opened = gateways.open(url)
    key, other = (each["key"] for each in opened["sessions"])
    talk = ask(url, key, [user("a")])
    ask(url, other, [user("a")])
    with ThreadPoolExecutor() as threads:
        yard.control(Mode.ABORT)
        asking = threads.submit(ask, url, key, [*talk, user("b")])
        until(lambda: yard.stages().get("aborted") == 1)
        rewarding = threads.submit(gateways.reward, url, other, score=1.0)
        yard.control(Mode.RUN)
        assert yard.reissue() == 1
        assert len(asking.result()) == 4
        assert rewarding.result().status_code == 200
    assert gateways.reward(url, key, score=1.0).status_code == 200
    until(lambda: yard.stages().get("completed") == 1)
    assert len(trained(yard.group(opened["group"]).states)) == 3

    refused = set()
    _, told, mac = key.replace(".", "-live-").split("-live-")
    # texts of every length, most of which are no base64, and what another text of the same key is
    forged = [f"rmq-live-{'A' * length}.{mac}" for length in (*range(1, 9), 200)]
    forged += [f"rmq-live-{told}=.{mac}", f"rmq-live-{told[:-1]}.{mac}", f"{key}x", "rmq-live-a.b"]
    for wrong in ("", "x", key[:-1] + ("A" if key[-1] != "A" else "B"), *forged):
        headers = {"Authorization": f"Bearer {wrong}"} if wrong else {}
        for path in ("/v1/chat/completions", "/v1/models", "/sessions"):
            method = "GET" if path.endswith("models") else "POST"
            answer = gateways.http.request(method, url + path, headers=headers)
            refused.add((answer.status_code, answer.text))
        if wrong:
            answer = gateways.reward(url, wrong, score=1.0)
            refused.add((answer.status_code, answer.text))
    assert len(refused) == 1
    assert refused.pop()[0] == 401
    # a key opens no sessions
    headers = {"Authorization": f"Bearer {key}"}
    assert gateways.http.post(f"{url}/sessions", headers=headers).status_code == 401


HOSTILE = {
    "brackets": b"[" * 100_000,
    "objects": b'{"score":' * 100_000,
    "deep": b'{"score": 1, "more": ' + b"[" * 500 + b"]" * 500 + b"}",
    "long": b'{"score": 1, "more": "' + b"x" * (2 << 20) + b'"}',
    "half": b'{"score": 1',
    "not UTF-8": b'{"score": "\xff"}',
    "half a surrogate pair": b'{"\\ud800": 1}',
    "a list": b"[1]",
    "nothing": b"",
    "huge": b'{"score": 1e999}',
}


@pytest.mark.parametrize("make_yard", ["valkey"], indirect=True)
def test_a_body_that_is_no_reward_is_refused_and_the_session_goes_on(
    make_gateways: Callable[..., Gateways],
) -> None:
    gateways = make_gateways()
    url = gateways.start("g0")
    first, second = (each["key"] for each in gateways.open(url)["sessions"])
    for key in (first, second):
        ask(url, key, [user("a")])
    for name, body in HOSTILE.items():
        refused = gateways.http.post(f"{url}/sessions/{first}/reward", content=body)
        assert (name, refused.status_code) == (name, 400)
        assert len(refused.text) < 1000
        if body:  # without one, a session is opened
            opened = gateways.http.post(f"{url}/sessions", headers=gateways.admin, content=body)
            assert (name, opened.status_code) == (name, 400)
    for key in (first, second):
        assert gateways.reward(url, key, score=1.0).status_code == 200
