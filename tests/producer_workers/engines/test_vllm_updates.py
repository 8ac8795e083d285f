"""Test weight updates while vLLM samples: which weights and which KV cache made each token.

The weights come by each transport, from the trainer's side to the engine.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from buffer.control.control import ControlState, Mode
from buffer.ids import new_nonce
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.weights import delta, folder_manifest
from buffer.weights.redis_chunks import VersionStore
from buffer.weights.transport import TransportName
from buffer.weights.transports import open_sender
from buffer.wire.rollout import PolicyVersion
from producer_workers.config.engine import VllmConfig
from producer_workers.engines.base import Engine, EngineError, Generation
from producer_workers.engines.vllm.api import keeps_cache
from producer_workers.worker.inbox import Inbox
from producer_workers.worker.weight_updates import WeightUpdates
from tests.producer_workers.engines.conformance import NEXT, TOLERANCE, sampling
from tests.producer_workers.engines.conftest import FIRST, Folders
from tests.producer_workers.engines.conftest import Run as RunOnLoop
from tests.producer_workers.engines.tiny_model import reference_logprobs, write_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

MEMBERS = 4
PROMPT = np.arange(40, 60, dtype=np.int32)
WAITS_S = (0.1, 0.05, 0.2, 0.02, 0.4, 0.8, 1.6, 3.2)
LONG = 400


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return four versions, each as far from the one before as a large step of an optimizer.

    A step changes a few percent of the weights, as one of RL does in bfloat16.
    """
    root = tmp_path_factory.mktemp("history")
    folders = [write_tiny_model(root / "0", seed=1)]
    draw = np.random.default_rng(1)
    for number in (1, 2, 3):
        weights = load_file(folders[-1] / "model.safetensors")
        changed = {name: value + step(draw, value.shape) for name, value in weights.items()}
        folders.append(root / str(number))
        folders[-1].mkdir()
        (folders[-1] / "config.json").write_bytes((folders[0] / "config.json").read_bytes())
        save_file(changed, folders[-1] / "model.safetensors", {"format": "pt"})
    return folders


def step(draw: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    changes = 0.01 * draw.standard_normal(shape) * (draw.random(shape) < 0.04)
    return changes.astype("<f4")


def named(number: int) -> PolicyVersion:
    return PolicyVersion("main", number)


@pytest.fixture(scope="module")
def states(
    history: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Run, list[ControlState]]]:
    """Publish version 1 as changes in a folder, 2 as changes in Redis, and 3 whole in Redis."""
    folder = tmp_path_factory.mktemp("published")
    with ExitStack() as stack:
        store = stack.enter_context(closing(Store("memory://updates")))
        limits = RunLimits(tasks={"math": TaskLimits()})
        run = Run.create(store, "updates", new_nonce(), limits, FIRST, "")

        def publish(way: TransportName, delta_base_every: int, *versions: int) -> ControlState:
            sender = open_sender(
                way, store, run.keys, folder / way, keep=2, delta_base_every=delta_base_every
            )
            stack.callback(sender.close)
            for version in versions:
                save = partial(shutil.copytree, history[version], dirs_exist_ok=True)
                published = sender.write(named(version), save)
            return ControlState(1, Mode.RUN, (), named(versions[-1]), *published)

        states = [publish("folder", 4, 0, 1), publish("redis", 4, 1, 2), publish("redis", 1, 3)]
        manifests = [
            (Path(states[0].weights_path) / folder_manifest.NAME).read_bytes(),
            VersionStore(store, run.keys).find(str(named(2))) or b"",
        ]
        assert all(delta.NAME in folder_manifest.files_of(manifest) for manifest in manifests)
        yield run, states


async def sample_through_updates(
    engine: Engine, history: Sequence[Path], run: Run, states: Sequence[ControlState]
) -> list[Generation]:
    """Return a group whose responses span all versions, which a worker gets by each transport."""
    inbox = Inbox()
    inbox.open()
    controlled = WeightUpdates(run, engine, inbox)
    for wait_s in WAITS_S:
        await engine.load_weights(history[0], named(0))
        running = [
            asyncio.create_task(
                engine.generate(f"math-0000000001/{n}", PROMPT, sampling(LONG, seed=n))
            )
            for n in range(MEMBERS)
        ]
        for state in states:
            await asyncio.sleep(wait_s)
            while not await controlled.update(state):
                assert not controlled.refusal
                await inbox.read(math.inf)
        made = await asyncio.gather(*running)
        if all(len(one.spans) == len(history) for one in made):
            await controlled.close()
            return made
    raise AssertionError("the updates never came in the middle of the responses")


def distances(history: Sequence[Path], made: Sequence[Generation]) -> list[NDArray[np.float64]]:
    by_span: list[list[NDArray[np.float64]]] = [[] for _ in history]
    for one in made:
        tokens = PROMPT.tolist(), one.token_ids.tolist()
        for parts, span in zip(by_span, one.spans, strict=True):
            expected = reference_logprobs(history[span.version], *tokens)
            of_span = slice(span.start, span.start + span.length)
            parts.append(np.abs(one.logprobs - expected)[of_span])
    return [np.concatenate(parts) for parts in by_span]


@pytest.mark.parametrize("keeps", [False, True], ids=["clear", "keep"])
def test_the_stamp_of_each_token_names_the_weights_that_made_it(
    vllm_engine: Engine,
    run: RunOnLoop[list[Generation]],
    history: list[Path],
    states: tuple[Run, list[ControlState]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    keeps: bool,
) -> None:
    """Cleared: all logprobs equal those of the stamped version. Kept: those of the first do."""
    monkeypatch.setattr(vllm_engine, "_keeps_cache", keeps)
    made = run(sample_through_updates(vllm_engine, history, *states))
    assert "reading the folder" not in caplog.text  # instead of the trainer's memory
    by_span = distances(history, made)
    assert by_span[0].max() < TOLERANCE
    if not keeps:
        assert max(part.max() for part in by_span) < TOLERANCE
        return
    assert all(part.max() > TOLERANCE for part in by_span[1:])
    older = distances([history[0], *history[:-1]], made)
    # together, since a span may be too short for a mean
    assert np.concatenate(by_span[1:]).mean() < np.concatenate(older[1:]).mean()


def test_a_kept_cache_is_for_running_requests_only(
    vllm_engine: Engine, run: RunOnLoop[Any], folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is long enough to be found in the prefix cache: as long as two blocks of it."""
    monkeypatch.setattr(vllm_engine, "_keeps_cache", True)
    prompt = np.arange(300, dtype=np.int32) % 200 + 50

    async def scenario() -> Generation:
        await vllm_engine.generate("before/0", prompt, sampling(4))
        await vllm_engine.load_weights(folders.second, NEXT)
        return await vllm_engine.generate("after/0", prompt, sampling(4))

    made = run(scenario())
    expected = reference_logprobs(folders.second, prompt.tolist(), made.token_ids.tolist())
    assert np.abs(made.logprobs - expected).max() < TOLERANCE


def test_a_model_that_reads_images_clears_its_cache(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(orjson.dumps({"image_token_id": 5}))
    assert not keeps_cache(VllmConfig(), tmp_path)
    with pytest.raises(EngineError, match="cannot keep its KV cache"):
        keeps_cache(VllmConfig(prefix_cache="keep"), tmp_path)
    (tmp_path / "config.json").write_bytes(b"{}")
    assert keeps_cache(VllmConfig(), tmp_path)
    assert not keeps_cache(VllmConfig(prefix_cache="clear"), tmp_path)
