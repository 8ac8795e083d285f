from __future__ import annotations

import sys
import threading
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import ConfigError, RunNotFound
from buffer.ids import new_nonce
from buffer.redis.store import Store
from buffer.run.run import Run
from tests.buffer.scene import FIRST, LIMITS, Scene


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
