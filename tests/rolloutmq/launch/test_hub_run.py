"""A run whose model and data are on the Hub, over its life: made, continued after main has moved,
joined by a worker of another machine, and made again without a network.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest

from buffer.redis.keys import Keys
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.run.origin import Origin
from tests.consumer.grpo.models.tiny import build_model
from tests.fake_hub import FakeHub, fake_hub
from tests.rolloutmq.conftest import ROOT, in_process, rolloutmq

CONFIG = Path(__file__).with_name("hub_run.toml").read_text(encoding="utf-8")
CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: train.jsonl
---
"""


def push(hub: FakeHub, models: Path, seed: int) -> str:
    rows = b"".join(
        orjson.dumps({"problem": f"{n} + {seed}", "answer": str(n + seed)}) + b"\n"
        for n in range(8)
    )
    hub.push("datasets/openai/sums", {"train.jsonl": rows, "README.md": CARD})
    model = build_model(models, seed=seed)
    hub.push_folder("qwen/big", model)
    return hub.push_folder("qwen/tiny", model)


@pytest.mark.slow
def test_a_run_from_the_hub(tmp_path: Path) -> None:
    (tmp_path / "far.toml").write_text(CONFIG, encoding="utf-8")
    with fake_hub() as hub, EmbeddedServer(tmp_path / "server") as server:
        here = hub.env(tmp_path / "home") | {"REDIS_URL": server.url}
        old = push(hub, tmp_path, seed=0)
        done = rolloutmq("create", "far.toml", cwd=tmp_path, **here)
        assert done.returncode == 0, done.stderr
        assert old in done.stdout
        new = push(hub, tmp_path, seed=1)
        assert new != old

        # another revision is refused; the same command keeps the commit, also without a network
        done = rolloutmq(
            "create", "far.toml", "--set", f"policy.revision={new}", cwd=tmp_path, **here
        )
        assert done.returncode == 2
        assert f"[policy] model is qwen/tiny@{new}, the run was made with qwen/tiny@{old}" in (
            done.stderr
        )
        offline = here | {"HF_HUB_OFFLINE": "1"}
        done = rolloutmq("create", "far.toml", cwd=tmp_path, **offline)
        assert (done.returncode, old in done.stdout) == (0, True), done.stderr

        # a machine with nothing but the config learns the commits from the run
        there = tmp_path / "there"
        there.mkdir()
        (there / "far.toml").write_text(CONFIG, encoding="utf-8")
        elsewhere = hub.env(there / "home") | {"REDIS_URL": server.url}
        work_until_registered(there, elsewhere, server, "late")
        (snapshot,) = (there / "home/hub/models--qwen--tiny/snapshots").iterdir()
        assert snapshot.name == old
        assert not list((there / "home/hub").glob("datasets--*")), "a worker reads no data"
        (big,) = (there / "home/hub/models--qwen--big/snapshots").iterdir()
        store = Store(server.url)
        origin = Origin.from_meta(
            {k.decode(): v.decode() for k, v in store.client.hgetall(Keys("far").meta).items()}
        )
        store.close()
        assert origin is not None
        assert origin.source == f"qwen/tiny@{old}"
        assert origin.models == [f"qwen/big@{big.name}"]


def work_until_registered(
    folder: Path, env: dict[str, str], server: EmbeddedServer, name: str
) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-m", "rolloutmq", "worker", "far.toml", "--id", name],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        stderr=subprocess.PIPE,
        text=True,
    )
    store = Store(server.url)
    try:
        while store.client.zscore(Keys("far").workers, name) is None:
            assert worker.poll() is None, worker.stderr and worker.stderr.read()
            time.sleep(0.1)
    finally:
        worker.kill()
        worker.communicate()
        store.close()


@pytest.mark.parametrize("words", [["run"], ["train"]], ids=" ".join)
def test_without_a_network_one_line_says_what_to_run(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "far.toml").write_text(CONFIG, encoding="utf-8")
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = in_process(*words, "far.toml", cwd=tmp_path, **env)
    assert done.returncode == 2
    error, hint = done.stderr.strip().splitlines()
    assert error.startswith("error: there is no folder openai/sums here")
    assert "`hf download openai/sums --repo-type dataset`" in hint
