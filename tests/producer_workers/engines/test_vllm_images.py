from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from buffer.redis.store import Store
from buffer.run.run import Run as RunHandle
from buffer.wire.rollout import MediaRef, PolicyVersion
from buffer.wire.sampling import SampleParams
from consumer.handle.step_log import StepLog
from producer_workers.build import make_producer, make_worker
from producer_workers.config.dataset import ImagesSection
from producer_workers.engines import build_engine
from producer_workers.engines.base import Generation, GenerationError
from producer_workers.engines.vllm.engine import VllmEngine
from producer_workers.images import ImageError, ImageFolder, ReadImage, png_of
from rolloutmq.config.fingerprint import origin_of
from rolloutmq.config.load import load_config
from rolloutmq.launch.create import create_run
from rolloutmq.launch.training import train
from tests.producer_workers.engines.conformance import LONG, TOLERANCE, interrupt, sampling
from tests.producer_workers.engines.conftest import CPU_ENGINE, FIRST, Run
from tests.producer_workers.engines.tiny_vision_model import (
    picture,
    reference_logprobs,
    write_tiny_vision_model,
)
from tests.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GID = "see-0000000001"
PICTURES = [picture(1, 56, 28), picture(2, 60, 100)]
"""2 and 8 tokens."""
LARGER = "an image with more tokens"
IMAGE = 320
FIRST_OF = 321
LAST_OF = 322
PROMPT = np.array(
    [40, FIRST_OF, *[IMAGE] * 2, LAST_OF, 41, FIRST_OF, *[IMAGE] * 8, LAST_OF, 42, 43], "<i4"
)


class CountingFolder(ImageFolder):
    """Notes what it reads."""

    def __init__(self, run_folder: Path) -> None:
        super().__init__(run_folder, ImagesSection())
        self.uris: list[str] = []

    def read(self, ref: MediaRef) -> ReadImage:
        self.uris.append(ref.uri)
        return super().read(ref)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("vision")
    return write_tiny_vision_model(root / "first", seed=1), write_tiny_vision_model(
        root / "second", seed=2
    )


@pytest.fixture(scope="module")
def running(run: Run[None], models: tuple[Path, Path]) -> Iterator[VllmEngine]:
    engine = build_engine(CPU_ENGINE, models[0], FIRST)
    assert isinstance(engine, VllmEngine)
    run(engine.start())
    yield engine
    run(engine.shutdown())


@pytest.fixture
def folder(tmp_path: Path) -> CountingFolder:
    return CountingFolder(tmp_path / "run")


@pytest.fixture
def engine(
    running: VllmEngine, run: Run[None], folder: CountingFolder, models: tuple[Path, Path]
) -> Iterator[Any]:
    running.images.read_from(folder)
    yield running
    running.images.forget(GID)
    run(running.resume())
    run(running.load_weights(models[0], FIRST))


@pytest.fixture
def refs(folder: CountingFolder) -> list[MediaRef]:
    uris = [folder.put(png_of(image), "png") for image in PICTURES]
    return [
        MediaRef(kind="image", uri=uri, tokens=tokens)
        for uri, tokens in zip(uris, (2, 8), strict=True)
    ]


async def generate(
    engine: VllmEngine,
    params: SampleParams,
    behind: Sequence[int] | NDArray[np.int32] = (),
    member: int = 0,
) -> Generation:
    return await engine.generate(f"{GID}/{member}/0", np.array([*PROMPT, *behind], "<i4"), params)


def worst_difference(folder: Path, made: Generation, images: Any = PICTURES) -> float:
    reference = reference_logprobs(folder, PROMPT.tolist(), images, made.token_ids.tolist())
    return float(np.abs(made.logprobs - np.array(reference)).max())


def without_image_tokens(made: Generation) -> Generation:
    """Exclude the placeholder, which a random model may sample.

    No forward pass elsewhere reads it as a mere token.
    """
    assert not set(made.token_ids.tolist()) & {IMAGE, FIRST_OF, LAST_OF, 383}, "choose another seed"
    return made


def test_logprobs_are_those_of_a_forward_pass_with_the_same_pixels(
    engine: VllmEngine, run: Run[Any], refs: list[MediaRef], models: tuple[Path, Path]
) -> None:
    engine.images.show(GID, refs)
    made = without_image_tokens(run(generate(engine, sampling(24, seed=5))))
    assert worst_difference(models[0], made) < TOLERANCE
    assert worst_difference(models[0], made, [picture(3, 56, 28), PICTURES[1]]) > 100 * TOLERANCE
    assert worst_difference(models[0], made, [PICTURES[0], picture(3, 60, 100)]) > 100 * TOLERANCE


def test_a_group_reads_its_images_once_and_sees_them_in_each_request(
    engine: VllmEngine, run: Run[Any], refs: list[MediaRef], folder: CountingFolder
) -> None:
    async def scenario() -> tuple[list[Generation], Generation]:
        engine.images.show(GID, refs)
        many = await asyncio.gather(
            *(generate(engine, sampling(12, seed=5), member=n) for n in range(6))
        )
        engine.images.forget(GID)
        # the same tokens, and nothing to see
        return many, await generate(engine, sampling(12, seed=5))

    many, blind = run(scenario())
    assert folder.uris == [ref.uri for ref in refs]
    assert all(np.array_equal(made.token_ids, many[0].token_ids) for made in many)
    assert not np.allclose(blind.logprobs[:1], many[0].logprobs[:1])
    assert not engine.images._heads


def test_what_was_aborted_goes_on_behind_its_tokens_as_if_it_had_not_been(
    engine: VllmEngine, run: Run[Any], refs: list[MediaRef]
) -> None:
    params = sampling(LONG, temperature=0.0)

    async def abort() -> None:
        await engine.pause("abort")
        await engine.resume()  # a request whose images are still read is not aborted, and goes on

    async def scenario() -> tuple[Generation, Generation, Generation]:
        engine.images.show(GID, refs)
        whole = await generate(engine, params)
        part = await interrupt(engine, params, abort, ask=generate)
        # another worker has seen none of it
        engine.images.forget(GID)
        engine.images.show(GID, refs)
        rest = await generate(
            engine, sampling(LONG - len(part.token_ids), temperature=0.0), part.token_ids
        )
        return whole, part, rest

    whole, part, rest = run(scenario())
    assert part.finish_reason == "abort"
    assert np.array_equal(np.concatenate([part.token_ids, rest.token_ids]), whole.token_ids)
    assert np.allclose(
        np.concatenate([part.logprobs, rest.logprobs]), whole.logprobs, atol=TOLERANCE
    )


def test_new_weights_see_the_images_anew_while_requests_run(
    engine: VllmEngine, run: Run[Any], refs: list[MediaRef], models: tuple[Path, Path]
) -> None:
    async def scenario() -> tuple[Generation, list[Generation]]:
        engine.images.show(GID, refs)
        running = [
            asyncio.create_task(generate(engine, sampling(200, seed=n), member=n)) for n in range(6)
        ]
        for version in range(4, 9):
            await asyncio.sleep(0.05)
            # a group is forgotten after its requests: none of them still waits for its images
            await asyncio.gather(*engine.images._heads.values())
            engine.images.forget(GID)  # so that each time something is on its way in
            engine.images.show(GID, refs)
            running += [
                asyncio.create_task(generate(engine, sampling(20), member=n)) for n in range(10, 14)
            ]
            await engine.load_weights(models[version % 2 == 0], PolicyVersion("main", version))
        made = await asyncio.gather(*running)
        return await generate(engine, sampling(24, seed=9)), made

    after, made = run(scenario())
    assert {len(one.token_ids) for one in made} == {200, 20}
    assert after.spans[0].version == 8
    assert worst_difference(models[1], without_image_tokens(after)) < TOLERANCE


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"tokens": 3}, GenerationError, "no 3 tokens 320 in a row for image 0"),
        ({"tokens": 0}, GenerationError, "no 0 tokens"),
        ({"uri": "file:///etc/passwd"}, ImageError, "not an image of the run"),
        ({"uri": LARGER}, GenerationError, "vLLM reads other tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_images_that_are_not_those_of_the_prompt_fail_their_group_alone(
    engine: VllmEngine,
    run: Run[Any],
    refs: list[MediaRef],
    folder: CountingFolder,
    change: Any,
    error: Any,
    reason: str,
) -> None:
    larger = folder.put(png_of(picture(1, 112, 112)), "png")
    change = {name: larger if value is LARGER else value for name, value in change.items()}
    engine.images.show(GID, [structs.replace(refs[0], **change), refs[1]])
    with pytest.raises(error, match=reason):
        run(generate(engine, sampling(2)))
    engine.images.show(GID, refs)
    assert len(run(generate(engine, sampling(2))).token_ids) == 2


# -- from a data set to the trainer --------------------------------------------------------------------

CONFIG = Path(__file__).with_name("vllm_images.toml").read_text(encoding="utf-8")
ROWS = [
    {"question": "Of <image> and <image>?", "images": ["0.png", "1.png"]},
    {"question": "?", "images": ["1.png"]},
]


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_images_of_a_data_set_are_written_once_sampled_and_trained(
    engine: VllmEngine, run: Run[Any], server: Server, run_name: str, models: tuple[Path, Path], tmp_path: Path,
) -> None:  # fmt: skip
    """It does so before and after an update."""
    for n in range(2):
        # of the size that needs no interpolation: training makes the places of patches differ
        # (tiny_vision_model.py)
        (tmp_path / f"{n}.png").write_bytes(png_of(picture(n, 56, 56)))
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(model=models[0], name=run_name, folder=tmp_path))
    producing = load_config(file)
    training = load_config(file)
    with closing(Store(server.url)) as store, closing(Store(server.url)) as for_trainer:
        made = create_run(store, producing, models[0])
        engine.images.read_from(ImageFolder(producing.run.folder, ImagesSection()))
        producer = make_producer(producing, made, origin_of(producing, models[0]))
        worker = make_worker(producing, made, engine, "w0")
        stop = threading.Event()

        async def whole_run() -> None:
            working = asyncio.create_task(worker.run())
            sending = asyncio.create_task(asyncio.to_thread(producer.produce_loop, stop))
            try:
                await asyncio.to_thread(
                    train,
                    RunHandle.open(for_trainer, run_name),
                    training,
                    models[0],
                    take_over=False,
                )
            finally:
                worker.stop()
                stop.set()
                await asyncio.gather(working, sending)

        run(asyncio.wait_for(whole_run(), 400))
        log = StepLog(training.run.folder / "steps.jsonl")
        log.read_new()
        assert [step.step for step in log.steps] == [1, 2]
        assert max(step.metrics["mismatch/max_logprob"] for step in log.steps) < TOLERANCE
        # the run may end before the worker has loaded the last weights, which no rollout needs
        assert engine.version().version >= 1
        assert made.account.fsck().clean
        trained = {gid for step in log.steps for gid in step.gids}
        assert len(trained) == 4
        assert len(list((tmp_path / "run" / "images").iterdir())) == len(ROWS)
