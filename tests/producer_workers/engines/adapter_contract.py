"""What every engine must do that samples with LoRA adapters: what is published is only the adapter."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from buffer.redis.store import Store
from buffer.weights.safetensors_files import BASE_CHECKSUM
from buffer.wire.rollout import PolicyVersion
from producer_workers.engines.base import Engine, Generation, WeightsError
from tests.producer_workers.engines.adapter_run import AdapterRun
from tests.producer_workers.engines.conformance import (
    LONG,
    PROMPT,
    TOLERANCE,
    generate,
    interrupt,
    sampling,
    worst_difference,
)
from tests.producer_workers.engines.conftest import Folders, Run
from tests.servers import Server

VERSIONS = [PolicyVersion("main", number) for number in (1, 2)]
REDIS = {"weights_transport": "redis", "max_staleness": 0}
FOLDER = {"weights_transport": "folder", "max_staleness": 1}


def file_of(adapter: Path) -> Path:
    return adapter / "adapter_model.safetensors"


class AdapterContract:
    """The tests of adapters for any engine, by the fixtures `engine` and `policy`.

    In the order of these tests an engine may be the same one: the first of them finds it without an
    adapter.
    """

    takes_whole_weights = False

    @pytest.mark.slow
    def test_adapters_take_each_others_place_while_tokens_flow(
        self, engine: Engine, run: Run[Any], folders: Folders, adapters: list[Path]
    ) -> None:
        greedy = sampling(LONG, temperature=0.0)

        async def scenario() -> tuple[Generation, Generation, Generation, Generation]:
            base = await generate(engine, sampling(60, seed=3))
            await engine.load_weights(adapters[0], VERSIONS[0])
            if not self.takes_whole_weights:
                with pytest.raises(WeightsError, match="holds no LoRA adapter"):
                    await engine.load_weights(folders.second, VERSIONS[1])
            one = await generate(engine, sampling(60, seed=3))
            older, newer = zip(adapters, VERSIONS, strict=True)
            mixed = await interrupt(
                engine,
                greedy,
                lambda: engine.load_weights(*newer),
                lambda: engine.load_weights(*older),
            )
            cut = mixed.spans[-1].start
            prompt = np.concatenate([PROMPT, mixed.token_ids[:cut]])
            return (
                base,
                one,
                mixed,
                await engine.generate("fresh", prompt, sampling(LONG - cut, temperature=0.0)),
            )

        base, one, mixed, fresh = run(scenario())
        assert worst_difference(folders.first, base, 1.0) < TOLERANCE
        assert worst_difference(adapters[0] / "merged", one, 1.0) < TOLERANCE
        assert worst_difference(folders.first, one, 1.0) > 0.1
        assert [(span.lineage, span.version) for span in mixed.spans] == VERSIONS
        assert sum(span.length for span in mixed.spans) == LONG
        assert np.array_equal(mixed.token_ids[mixed.spans[-1].start :], fresh.token_ids)
        assert engine.version() == VERSIONS[1]
        again = run(generate(engine, sampling(60, seed=3)))
        assert worst_difference(adapters[1] / "merged", again, 1.0) < TOLERANCE

    def test_a_torn_or_foreign_adapter_leaves_the_one_that_runs(
        self, engine: Engine, run: Run[Any], adapters: list[Path], tmp_path: Path
    ) -> None:
        names = ("torn", "foreign", "other")
        torn, foreign, other = (
            Path(shutil.copytree(adapters[1], tmp_path / name)) for name in names
        )
        file = file_of(torn)
        file.write_bytes(file.read_bytes()[:-100])
        tensors = load_file(file_of(foreign))
        save_file(
            {name: tensor[:, :7].clone() for name, tensor in tensors.items()}, file_of(foreign)
        )
        save_file(load_file(file_of(adapters[1])), file_of(other), {BASE_CHECKSUM: "0" * 32})

        async def scenario() -> tuple[Generation, Generation]:
            await engine.load_weights(adapters[0], VERSIONS[0])
            before = await generate(engine, sampling(60, seed=5))
            for folder in (torn, foreign, other):
                with pytest.raises(WeightsError):
                    await engine.load_weights(folder, VERSIONS[1])
            return before, await generate(engine, sampling(60, seed=5))

        before, after = run(scenario())
        assert np.array_equal(before.token_ids, after.token_ids)
        assert np.array_equal(before.logprobs, after.logprobs)
        assert engine.version() == VERSIONS[0]

    def test_every_token_of_a_run_was_sampled_with_the_adapter_that_its_stamp_names(
        self,
        engine: Engine,
        run: Run[None],
        folders: Folders,
        server_of: Callable[[str], Server],
        run_name: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        policy: dict[str, Any],
    ) -> None:
        """Train an adapter, publish it, sample with it, and train on that again."""
        store = Store(server_of("valkey").url, deadline_s=400.0)
        played = AdapterRun(store, run_name, tmp_path, folders.first, policy)
        run(played.play(engine, monkeypatch))
        store.close()
        assert played.worst() < TOLERANCE
        assert (
            played.worst(version=0) > 0.1
        )  # the first one changes nothing: these are the model's own logprobs
        if (
            policy is REDIS
        ):  # what a step is given was sampled by the weights before it, so trainer and engine agree
            assert played.versions() == [{0}, {1}, {2}, {3}]
            assert all(step["mismatch/abs_logprob"] < TOLERANCE for step in played.metrics())
