from __future__ import annotations

import random
import re
import sys
import threading
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import ConfigError, RunNotFound
from buffer.ids import group_id, new_nonce, split_group_id, valid_name
from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.redis.url import mask_url, open_client
from buffer.run.run import Run
from tests.buffer.scene import FIRST, LIMITS, Scene

NAMES = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)


@pytest.mark.parametrize("name", ["", "a b", "a{b}", "a:b", "ä", "a" * 65, "a/b", "a\n", "*"])
def test_names_that_could_forge_a_key_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="task name"):
        valid_name("task", name)
    with pytest.raises(ConfigError):
        Keys(name)


@given(task=NAMES, draw=st.integers(0, 10**10 - 1))
def test_group_id_says_task_and_draw(task: str, draw: int) -> None:
    assert split_group_id(group_id(task, draw)) == (task, draw)


@pytest.mark.parametrize(
    "text",
    [
        "", "math", "math-1", "-0000000001", "math-00000000001x", "ma th-0000000001",
        "a\n-0000000001",
    ],
)  # fmt: skip
def test_what_is_no_group_id_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a group id"):
        split_group_id(text)


def test_chunks_of_a_payload_follow_its_key() -> None:
    names = Keys("demo").payload_chunks("g-0000000001", "t", 3)
    base = "rmq:{demo}:payload:g-0000000001:t"
    assert names == [base, f"{base}:1", f"{base}:2"]


NAMED = r"[?&](?:password|ssl_password|sentinel_password)="
NO_WORD = r"[^\s'\"]*"
WITH_BOTH = re.compile(rf"([^:@/\s'\"]*):(?!//){NO_WORD}{NAMED}{NO_WORD}@{NO_WORD}", re.IGNORECASE)
USER = re.compile(rf"([^:@/\s'\"]*):(?!//){NO_WORD}@")
QUERY = re.compile(rf"({NAMED})[^&\s'\"]+", re.IGNORECASE)
PARTS = (
    *("redis", "://", ":", "//", "/", "@", "a", " ", "'", '"', "?password=", "&", "\n"),
    *("&ssl_password=", "&Sentinel_Password=", "b", "x.y"),
)


def by_expressions(text: str) -> str:
    """The same by the definition, which takes the square of the length, and more."""
    masked = USER.sub(r"\1:***@", WITH_BOTH.sub(r"\1:***", text))
    return QUERY.sub(r"\1***", masked)


def test_what_is_masked_is_as_defined() -> None:
    chance = random.Random(1)
    for _ in range(20_000):
        text = "".join(chance.choices(PARTS, k=chance.randrange(12)))
        assert mask_url(text) == by_expressions(text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", ["a", "a:", "?password=", ":@", "&ssl_password=x:", "a:b "])
def test_long_text_is_masked_in_one_pass(part: str) -> None:
    """Two million characters: the square of that would be no matter of minutes."""
    text = part * (2_000_000 // len(part))
    assert "secret" not in mask_url(f"{text}redis://u:secret@h")


@pytest.mark.parametrize(
    "url",
    ["redis://u:zebra?ss=1&quagga@h/0", "redis://u:zebra?quagga@h", "redis://h?password=zebra&x"],
)
def test_no_part_of_a_password_is_named_as_an_option(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_client(url)
    assert not re.search("zebra|quagga", str(caught.value))


def test_stores_that_name_the_same_memory_see_the_same_run(run_name: str) -> None:
    one = Store(f"memory://{run_name}")
    same = Store(f"memory://{run_name}")
    other = Store("memory://")
    with closing(one), closing(same), closing(other):
        run = Run.create(one, run_name, new_nonce(), LIMITS, FIRST, "/w")
        assert Run.open(same, run_name).nonce == run.nonce
        with pytest.raises(RunNotFound):
            Run.open(other, run_name)


@given(st.binary(max_size=4), st.integers(0, 40), st.integers(0, 40))
def test_bits_of_a_range_are_counted(bitmap: bytes, first: int, last: int) -> None:
    bits = "".join(f"{byte:08b}" for byte in bitmap)
    with closing(Store("memory://")) as store:
        store.client.set("bitmap", bitmap)
        assert store.client.bitcount("bitmap") == bits.count("1")
        assert store.client.bitcount("bitmap", first, last, "BIT") == bits[first : last + 1].count(
            "1"
        )


def test_threads_share_the_work_and_wake_each_other(run_name: str) -> None:
    with closing(Store("memory://")) as store:
        scene = Scene(store, store.client, run_name)
        workers = [f"w{i}" for i in range(4)]
        for name in workers:
            scene.worker(name)

        def work(name: str) -> None:
            for _ in range(400):
                if jobs := scene.claim(1, name):
                    scene.submit(jobs[0], worker=name)
                if len(scene.pool("completed")) == 20:
                    return
                store.wait(scene.keys.wake_up("workers"), 0.05, shared=True)

        threads = [threading.Thread(target=work, args=(name,)) for name in workers]
        for thread in threads:
            thread.start()
        for _ in range(5):
            scene.enqueue(4)
        for thread in threads:
            thread.join()
        assert len(scene.pool("completed")) == 20
        scene.check()


@pytest.mark.parametrize("package", ["fakeredis", "lupa"])
def test_missing_package_is_an_error_with_the_line_that_installs_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "buffer.redis.server.in_memory", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as caught:
        Store("memory://")
    assert "fakeredis" in caught.value.hint
