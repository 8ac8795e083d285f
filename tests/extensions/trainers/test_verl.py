from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.errors import ConfigError, Fenced, WireError
from rolloutmq.extensions.trainers import plain_values
from rolloutmq.extensions.trainers.verl import MessageQueueClient
from rolloutmq.extensions.trainers.verl_steps import TASK, MessageQueue
from tests.consumer.grpo.models.tiny import build_model
from tests.programs import ROOT
from tests.servers import Server

pytest.importorskip("verl", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")

with warnings.catch_warnings():
    # verl and Ray use what they themselves call deprecated
    warnings.simplefilter("ignore")
    import ray
    import torch
    from verl.experimental.fully_async_policy import message_queue as theirs

    from tests.extensions.trainers.verl_job import (
        WIDTH,
        Handle,
        job_config,
        ray_get,
        run_job,
        sample,
    )

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def server(server_of: Callable[[str], Server]) -> Server:
    return server_of("valkey")


@pytest.fixture
def client(server: Server, run_name: str, tmp_path: Path) -> Iterator[MessageQueueClient]:
    config = job_config(server.url, run_name, tmp_path, batch=1)
    made = MessageQueueClient(MessageQueue.remote(config, 3))
    yield made
    if steps := vars(made).get("_steps"):
        steps.close()


@pytest.fixture
def their_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(ray, "get", ray_get)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    queue = theirs.MessageQueue.__ray_actor_class__(None, 3)
    yield theirs.MessageQueueClient(Handle(queue, loop))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


each_client = pytest.mark.parametrize("kind", ["their_client", "client"])


async def test_a_sample_comes_back_as_it_was(client: MessageQueueClient) -> None:
    given = sample(7, version=3)
    batch = given.full_batch.batch
    batch["brain"] = torch.rand(2, 3).to(torch.bfloat16)
    batch["position_ids"] = torch.arange(2 * 3 * 12).reshape(2, 3, 12)
    batch["empty"] = torch.zeros(2, 0, dtype=torch.bool)
    other = given.full_batch.non_tensor_batch
    other["scalar"] = np.array([np.float32(0.5), np.str_("a")], object)
    other["lists"] = np.array([[1, 2], [3]], object)
    other["word"] = np.array(["long", "b"])
    given.full_batch.meta_info |= {
        "nan": float("nan"),
        "bytes": b"\xff",
        "none": None,
        "pair": (1, [2]),
    }
    assert await client.put_sample(given)
    (group,) = client._run.buffer.get(1, TASK)
    for n, state in enumerate(group.states):
        read = batch["attention_mask"][n].bool()
        assert state.prompt_ids is not None
        ids = [*state.prompt_ids, *state.response_ids]
        assert ids == batch["input_ids"][n][read].tolist()
        assert state.reward == {"score": batch["rm_scores"][n].sum().item()}
        assert {span.version for span in state.spans} == {3 * 2}
    found, left = await client.get_sample()
    assert left == 0
    assert (found.sample_id, found.epoch, found.rollout_status) == ("sample_0_7", 0, {"count/x": 7})
    assert list(found.full_batch.batch.keys()) == list(batch.keys())
    for name, tensor in batch.items():
        assert found.full_batch.batch[name].dtype == tensor.dtype
        assert torch.equal(found.full_batch.batch[name], tensor), name
    for part in ("non_tensor_batch", "meta_info"):
        expected, restored = (getattr(each.full_batch, part) for each in (given, found))
        assert list(restored) == list(expected)
        assert plain_values.encode(restored, part) == plain_values.encode(expected, part)
        assert {k: type(v) for k, v in restored.items()} == {
            k: type(v) for k, v in expected.items()
        }


async def test_padding_is_not_stored(client: MessageQueueClient) -> None:
    await client.put_sample(sample(1))
    (group,) = client._run.buffer.get(1, TASK)
    assert set(plain_values.decode(group.shared.extra["verl"])["batch"].values()) == {None}


async def test_rollouts_may_have_prompts_of_their_own(client: MessageQueueClient) -> None:
    given = sample(1)
    batch = given.full_batch.batch
    for name, place in (("prompts", -1), ("input_ids", WIDTH - 1)):
        batch[name][1, place] += 1
    await client.put_sample(given)
    found, _ = await client.get_sample()
    for name, tensor in batch.items():
        assert torch.equal(found.full_batch.batch[name], tensor), name


async def test_only_what_the_same_process_has_pickled_is_unpickled(
    client: MessageQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sample(1)
    await client.put_sample(ray.cloudpickle.dumps(given))
    with monkeypatch.context() as patched:
        patched.setattr(ray.cloudpickle, "loads", lambda *_: pytest.fail("unpickled"))
        patched.setattr(pickle, "loads", lambda *_: pytest.fail("unpickled"))
        found, _ = await client.get_sample()
    found = ray.cloudpickle.loads(found)
    assert torch.equal(found.full_batch.batch["responses"], given.full_batch.batch["responses"])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda data: data.non_tensor_batch["uid"].fill(object()), "non_tensor_batch.uid"),
        (lambda data: data.meta_info.update(lock=threading.Lock()), "meta_info.lock"),
        (lambda data: data.meta_info.update(big=[2**70]), "meta_info.big"),
        (lambda data: data.meta_info.update(x=torch.ones(2).to_sparse()), "meta_info.x"),
        (lambda data: data.batch.pop("rollout_log_probs"), "rollout_log_probs"),
        (lambda data: data.non_tensor_batch.pop("min_global_steps"), "min_global_steps"),
    ],
)
async def test_what_cannot_be_taken_apart_is_named(
    client: MessageQueueClient, change: Any, field: str
) -> None:
    given = sample(1)
    change(given.full_batch)
    with pytest.raises(WireError, match=field):
        await client.put_sample(given)
    assert await client.get_queue_size() == 0


@each_client
async def test_queue(kind: str, request: pytest.FixtureRequest) -> None:
    """The interface, against verl's own queue and against this one."""
    queue = request.getfixturevalue(kind)
    waiting = asyncio.create_task(queue.get_sample())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert await queue.put_sample(sample=sample(0)) is True
    found, left = await waiting
    assert (found.sample_id, left) == ("sample_0_0", 0)
    for number in (1, 2, 3):
        assert await queue.put_sample(sample(number)) is True
    expected = {"queue_size": 3, "total_produced": 4, "total_consumed": 1, "max_queue_size": 3}
    assert await queue.get_statistics() == expected | {"dropped_samples": 0}
    assert queue.get_statistics_sync() == expected | {"dropped_samples": 0}
    assert await queue.get_queue_size() == queue.get_queue_size_sync() == 3
    usage = await queue.get_memory_usage()
    assert usage["queue_samples"] == 3
    assert usage["estimated_memory_bytes"] > 0
    assert (await queue.get_sample())[0].sample_id == "sample_0_1"
    found, left = queue.get_sample_sync()
    assert (found.sample_id, left) == ("sample_0_2", 1)
    assert queue.get_validate_sync() is None
    for number in (1, 2):
        await queue.put_validate({"acc": number, "timing": (0.5,)})
    assert queue.get_validate_sync() == {"acc": 1, "timing": (0.5,)}
    assert queue.get_validate_sync() == {"acc": 2, "timing": (0.5,)}
    assert queue.get_validate_sync() is None
    await queue.put_sample(sample=None)
    assert (await queue.get_sample())[0].sample_id == "sample_0_3"
    assert await queue.get_sample() == (None, 0)
    await queue.shutdown()


@each_client
async def test_concurrent_puts(kind: str, request: pytest.FixtureRequest) -> None:
    queue = request.getfixturevalue(kind)
    numbers = range(20)
    kept = await asyncio.gather(*(queue.put_sample(sample(number)) for number in numbers))
    found = [(await queue.get_sample())[0].sample_id for _ in range(await queue.get_queue_size())]
    statistics = await queue.get_statistics()
    if kind == "their_client":
        assert kept.count(True) == len(found) == statistics["dropped_samples"] - 14 == 3
    else:
        assert kept.count(True) == len(found) == 20
        assert sorted(found) == sorted(f"sample_0_{number}" for number in numbers)
        assert statistics["dropped_samples"] == 0


async def test_the_end_of_a_job_and_the_copy_of_a_client_keep_the_samples(
    client: MessageQueueClient, server: Server, run_name: str, tmp_path: Path
) -> None:
    await client.put_sample(sample(1))
    await client.put_sample(None)
    await client.clear_queue()
    again = MessageQueue.remote(job_config(server.url, run_name, tmp_path, batch=1), 3)
    with pytest.raises(Fenced):
        await client.put_sample(None)  # of the job before
    copy = pickle.loads(pickle.dumps(MessageQueueClient(again)))
    assert (await copy.get_sample())[0].sample_id == "sample_0_1"
    with pytest.raises(TimeoutError):
        copy._steps._consumer.take_batch(2, {TASK: 1}, deadline_s=0.1)
    await copy.shutdown()


def test_a_config_without_a_run_is_refused(tmp_path: Path) -> None:
    config = job_config("", "", tmp_path)
    with pytest.raises(ConfigError, match="does not name a run"):
        MessageQueue.remote(config, 3)


KILLS = [
    ("generate", 3), ("put", 2), ("update", 2), ("save", 4), ("saved", 8), ("generate", 2),
    ("put", 2), ("update", 14), ("take", 14), ("save", 20),
]  # fmt: skip
"""Where the jobs are killed, one after the other, and at which sample."""


def test_each_sample_is_trained_once_although_the_job_is_killed(
    server: Server, run_name: str, tmp_path: Path
) -> None:
    config = job_config(server.url, run_name, tmp_path)
    for kill in [*KILLS, None]:
        job = FORK.Process(target=run_job, args=(config, kill))
        job.start()
        job.join()
        assert job.exitcode == (0 if kill is None else -signal.SIGKILL), kill
    check_account(MessageQueue.remote(config, 8), 24)


def test_a_job_in_ray_trains_each_sample_once_although_its_trainer_is_killed(
    server: Server, run_name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    words = [server.url, run_name, str(folder), str(build_model(tmp_path))]
    for victim in ("trainer", None):
        begins = newest_version(folder)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.extensions.trainers.verl_on_ray", *words]
        job = subprocess.Popen(command, cwd=ROOT, env=environment)
        if victim:
            while not (folder / f"global_step_{begins + 3}").exists():
                assert job.poll() is None
                time.sleep(0.02)
            os.kill(int((folder / f"{victim}.pid").read_text(encoding="utf-8")), signal.SIGKILL)
        assert (job.wait() == 0) == (victim is None)
    config = job_config(server.url, run_name, folder, samples=40)
    check_account(MessageQueue.remote(config, 8), 40)


def newest_version(folder: Path) -> int:
    file = folder / "latest_checkpointed_iteration.txt"
    return int(file.read_text(encoding="utf-8")) if file.exists() else 0


def check_account(queue: MessageQueue, least: int) -> None:
    """Check that the weights have seen each sample once, and that none but the last are left."""
    newest = newest_version(queue.checkpoints)
    file = queue.checkpoints / f"global_step_{newest}" / "actor" / "weights.json"
    trained = json.loads(file.read_text(encoding="utf-8"))
    assert len(trained) == len(set(trained)) == newest * queue.sync * queue.required
    assert len(trained) >= least
    account = queue.open().account
    found = account.totals().tasks[0]
    given = found.taken + found.archived
    # verl writes no checkpoint of the last steps where they are not a whole version
    assert 0 <= given - len(trained) < queue.sync * queue.required
    assert found.put - given == found.completed < queue.required
    assert account.fsck().clean
