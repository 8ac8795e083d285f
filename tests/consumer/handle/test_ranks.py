"""Trainers of one and of several ranks: same numbers, shared batches, and ranks that are killed.

All tests whose ranks are forked are in this file: pytest-xdist gives a file to one process, and
each process that needs ranks starts a warm process of its own.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from buffer.errors import GroupChanged
from buffer.run.run import Run
from consumer.grpo.model_state.saved_state import SavedState
from consumer.grpo.models.model_folder import load_model
from tests.consumer.grpo.learner.sharded_learner import CUT, STEPS, Life, main
from tests.consumer.handle import changed_share, many_lives, sharded_trainer
from tests.consumer.handle.crew import at_work
from tests.servers import Server
from tests.waits import until
from tests.warm_process import run_in_warm_process


class Lives:
    """Run lives, and read what they wrote."""

    def __init__(self, folder: Path, *lives: Life) -> None:
        self.folder = folder
        self.ranks = {life.name: life.ranks for life in lives}
        run_in_warm_process(folder, main, folder, lives)

    def metrics(self, name: str) -> list[dict[str, Any]]:
        files = [self.folder / f"{name}-{rank}.json" for rank in range(self.ranks[name])]
        found: list[list[dict[str, Any]]] = [orjson.loads(file.read_bytes()) for file in files]
        assert all(metrics == found[0] for metrics in found)  # of all ranks, on all ranks
        return found[0]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        files = (self.folder / name).glob("*.safetensors")
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def state(self, name: str) -> dict[str, torch.Tensor]:
        with SavedState(self.folder / "state" / name) as state:
            return {key: tensor.clone() for key, tensor in state.items()}

    def assert_same(self, name: str, other: str, *, first: int = 0) -> None:
        expected = self.metrics(other)[first:]
        assert len(self.metrics(name)) == len(expected) == STEPS - first
        for found, wanted in zip(self.metrics(name), expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5), name
        weights = self.weights(name)
        assert weights.keys() == self.weights(other).keys()
        for key, tensor in self.weights(other).items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-3, atol=5e-4)


@pytest.mark.slow
def test_ranks_train_as_one_does_and_resume_in_other_numbers(
    model_dir: Path, tmp_path: Path
) -> None:
    spread = {"sharding": {"reshard_after_forward": False, "reduce_each_micro_batch": True}}
    spread["sharding"]["cpu_offload"] = True
    lives = Lives(
        tmp_path,
        Life(name="one", model=model_dir),
        Life(name="two", model=model_dir, ranks=2),
        Life(name="spread", model=model_dir, ranks=2, options=spread),
        Life(name="taught", model=model_dir, options=DISTILLATION),
        Life(name="two-taught", model=model_dir, ranks=2, options=DISTILLATION),
        Life(name="two-two", model=model_dir, ranks=2, after="two"),
        Life(name="two-three", model=model_dir, ranks=3, after="two"),
        Life(name="two-one", model=model_dir, after="two"),
    )
    for name in ("two", "spread"):
        lives.assert_same(name, "one")
    lives.assert_same("two-taught", "taught")
    assert lives.metrics("taught")[0]["distill/top_coverage"] > 0
    assert lives.metrics("two")[0]["optim/grad_norm"] > 0

    # with the same ranks exactly, with others but for the order in which numbers are added
    assert lives.metrics("two-two") == lives.metrics("two")[CUT:]
    again = lives.weights("two-two")
    assert all(torch.equal(tensor, again[name]) for name, tensor in lives.weights("two").items())
    for name in ("two-three", "two-one"):
        lives.assert_same(name, "one", first=CUT)

    # each rank wrote about half of it, and transformers reads what they wrote together
    sizes = [file.stat().st_size for file in (tmp_path / "two").glob("*.safetensors")]
    assert len(sizes) == 2
    assert max(sizes) < 0.7 * sum(sizes)
    loaded = load_model(tmp_path / "two").state_dict()
    assert all(torch.equal(loaded[name], t) for name, t in lives.weights("two").items())


DISTILLATION = {"distillation": {"top_k_loss": "forward"}}


def build_mixture(folder: Path) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_mixture_of_experts_is_published_under_the_names_that_it_was_loaded_from(
    tmp_path: Path,
) -> None:
    model = build_mixture(tmp_path / "mixture")
    still: dict[str, Any] = {"learning_rate": 1e-30, "bf16": True}
    lives = Lives(
        tmp_path,
        Life(name="one", model=model),
        Life(name="two", model=model, ranks=2),
        Life(name="still", model=model, steps=1, options=still),
        Life(name="two-still", model=model, ranks=2, steps=1, options=still),
    )
    lives.assert_same("two", "one")
    start = load_file(model / "model.safetensors")
    for name in ("still", "two-still"):
        written = lives.weights(name)
        assert written.keys() == start.keys()
        assert all(torch.equal(written[key], t.bfloat16()) for key, t in start.items())
    loaded = load_model(tmp_path / "two-still").state_dict()
    expected = load_model(model).state_dict()
    assert all(torch.equal(loaded[key], t.bfloat16().float()) for key, t in expected.items())
    index = orjson.loads((tmp_path / "two" / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"].keys() == start.keys()


LORA = {"lora": {"rank": 4}, "learning_rate": 1e-2}


@pytest.mark.slow
def test_adapter_and_critic_train_on_two_ranks_as_on_one(model_dir: Path, tmp_path: Path) -> None:
    both: dict[str, Any] = {"model": model_dir, "has_critic": True}
    rounded = LORA | {"bf16": True}
    lives = Lives(
        tmp_path,
        Life(name="one", options=LORA, **both),
        Life(name="two", ranks=2, options=LORA, **both),
        Life(name="again", ranks=2, options=LORA, after="one", **both),
        Life(name="rounded", ranks=2, steps=1, options=rounded, **both),
    )
    lives.assert_same("two", "one")
    lives.assert_same("again", "one", first=CUT)
    assert "critic/loss" in lives.metrics("one")[0]
    # one token of 44 may cross the bound of its ratio
    assert lives.metrics("rounded")[0] == pytest.approx(lives.metrics("one")[0], rel=0.1, abs=0.03)


no_compiler = shutil.which("g++") is None


@pytest.mark.slow
@pytest.mark.skipif(no_compiler, reason="needs g++")
def test_compiled_layers_train_as_others_do_on_one_rank_and_on_several(
    model_dir: Path, tmp_path: Path
) -> None:
    options = {"compile": True}
    lives = Lives(
        tmp_path,
        Life(name="plain", model=model_dir),
        Life(name="compiled", model=model_dir, options=options),
        Life(name="two", model=model_dir, ranks=2, options=options),
    )
    for name in ("compiled", "two"):
        lives.assert_same(name, "plain")


def read(folder: Path, life: int, step: int) -> list[dict[str, Any]]:
    return [
        orjson.loads((folder / str(life) / f"{step}-{rank}.json").read_bytes())
        for rank in range(sharded_trainer.RANKS)
    ]


def check_step(parts: list[dict[str, Any]]) -> None:
    """Every group on one rank, and both hold the same manifest."""
    assert parts[0]["manifest"] == parts[1]["manifest"]
    assert sorted(parts[0]["gids"] + parts[1]["gids"]) == sorted(parts[0]["manifest"])
    assert abs(parts[0]["tokens"] - parts[1]["tokens"]) <= 20  # a group has at most 4 x 5


def test_ranks_share_whole_steps_and_one_that_dies_fails_the_step_for_all(
    server: Server, run: Run, tmp_path: Path
) -> None:
    with at_work(run, math=17):
        until(lambda: run.buffer.count("math") == 17, "all groups")
    bad = run.buffer.peek(6, "math")[5].gid  # of the second step
    run.store.client.set(run.keys.payload(bad, run.record(bad)["payload"]), b"nonsense")

    lives = [{"first": 1, "last": 4, "die_at": 3}, {"first": 3, "last": 4}]
    order = {"url": server.url, "run": run.name, "folder": tmp_path, "lives": lives}
    ends = orjson.loads(run_in_warm_process(tmp_path, sharded_trainer.main, order).splitlines()[-1])
    assert ends[0][1] == sharded_trainer.KILLED
    assert ends[0][0] not in (0, sharded_trainer.KILLED)  # it noticed, and did not continue alone
    assert ends[1] == [0, 0]
    steps = [read(tmp_path, 0, step) for step in (1, 2, 3)] + [read(tmp_path, 1, 4)]
    assert read(tmp_path, 1, 3) == steps[2]
    for parts in steps:
        check_step(parts)
    trained = [gid for parts in steps for gid in parts[0]["manifest"]]
    assert len(set(trained)) == len(trained) == 16
    assert bad not in trained
    assert "WireError" in run.dead_letters.reason(bad)["reason"]
    assert run.ledger.steps() == (4, 4, 4)
    assert run.account.fsck().clean


def test_a_group_that_changes_in_memory_ends_all_ranks_before_the_commit(
    server: Server, run: Run, tmp_path: Path
) -> None:
    with at_work(run, math=17):
        until(lambda: run.buffer.count("math") == 17, "all groups")
    lives = [{"first": 1, "last": 3, "change_at": 2}, {"first": 2, "last": 3}]
    order = {"url": server.url, "run": run.name, "folder": tmp_path, "lives": lives}
    ends = orjson.loads(run_in_warm_process(tmp_path, sharded_trainer.main, order).splitlines()[-1])
    assert ends == [[GroupChanged.exit_code] * 2, [0, 0]]
    assert read(tmp_path, 0, 2) == read(tmp_path, 1, 2)


def test_the_reference_trainer_ends_all_ranks_when_a_group_of_one_changes_in_memory(
    server: Server, run: Run, model_dir: Path, tmp_path: Path
) -> None:
    with at_work(run, math=17, stamp=0):
        order = {"url": server.url, "run": run.name, "folder": tmp_path, "model": model_dir}
        printed = run_in_warm_process(tmp_path, changed_share.main, order)
    assert orjson.loads(printed.splitlines()[-1]) == [GroupChanged.exit_code] * 2
    assert run.ledger.steps()[:2] == (changed_share.STEP, 0)
    assert run.control.state().weights.version < changed_share.STEP


@pytest.mark.parametrize(
    ("seed", "lives", "ranks"),
    [(4, 4, "1"), pytest.param(22, 5, "2,4,1,2", marks=pytest.mark.slow)],
)
def test_weights_are_those_of_the_surviving_batches_whatever_killed_the_trainer(
    model_dir: Path, tmp_path: Path, seed: int, lives: int, ranks: str
) -> None:
    """Check that no group is trained twice, none that was committed is missing, and batches repeat.

    More seeds, by hand: `python -m tests.consumer.handle.many_lives FOLDER MODEL SEED LIVES RANKS`.
    """
    sizes = [int(size) for size in ranks.split(",")]
    printed = run_in_warm_process(
        tmp_path, many_lives.main, tmp_path / "lives", model_dir, seed, lives, sizes
    )
    report = orjson.loads(printed.splitlines()[-1])
    assert report["deaths"] > 0
    assert report["moved"] > 1e-3
    # several ranks add up gradients in another order
    assert report["differs"] <= (0.0 if ranks == "1" else 1e-5)
