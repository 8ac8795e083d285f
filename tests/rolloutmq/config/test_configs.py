from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import orjson
import pytest

from buffer.errors import ConfigError
from buffer.imports import load_object
from producer_workers.config.engine import VllmConfig
from producer_workers.config.task import named_judges
from producer_workers.hub import model_repository
from producer_workers.judges.load import load_judge, make_judge
from rolloutmq.config.load import load_config
from tests.rolloutmq.conftest import in_process

CONFIGS = Path(__file__).parents[3] / "configs"
FILES = sorted(CONFIGS.glob("*.toml"))


PRESETS = [path for path in FILES if path.name.startswith("qwen3")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_example_loads_with_its_judges(path: Path) -> None:
    for task in load_config(path).tasks.values():
        make_judge(task.judge, load_judge)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_a_preset_says_what_it_needs(path: Path) -> None:
    config = load_config(path)
    launch = config.launch
    trainer, workers = launch.trainer_gpus or [], launch.worker_gpus or []
    said = dict(re.findall(r"^# (GPUs|Redis|Time|Install): (.*)$", path.read_text("utf-8"), re.M))
    assert sorted([*trainer, *workers]) == list(range(int(said["GPUs"].split()[0])))
    assert launch.ranks(has_own_loop=False) == len(trainer)
    assert isinstance(config.engine, VllmConfig)
    assert launch.workers * config.engine.shards == len(workers)
    size, unit, *_ = said["Redis"].split()
    assert (
        config.memory_problem(int(float(size) * {"MiB": 1 << 20, "GiB": 1 << 30}[unit] * 1.05))
        == ""
    )
    assert "not measured" in said["Time"]
    assert model_repository(config.policy)
    assert ("math" in said["Install"]) == any(
        "math_verify" in task.judges for task in config.tasks.values()
    )
    for task in config.tasks.values():
        longest = (config.producer.max_prompt_tokens or 0) + task.sample.max_tokens
        assert longest <= (config.engine.max_model_len or 0) <= config.learner.token_budget


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_a_preset_says_what_simulate_says_of_it(path: Path) -> None:
    config = load_config(path)
    text = path.read_text("utf-8")
    said, lines = re.findall(r"^# Simulated: (.*)\n((?:# {5,}.*\n)+)", text, re.M)[0]
    _, *words = shlex.split(re.sub(r"\\\n#|^#", "", lines))
    (task,) = (config.tasks[name] for name in config.training_tasks)
    assert isinstance(config.engine, VllmConfig)
    assert (
        dict(pairwise(words)).items()
        >= {
            "--workers": str(config.launch.workers),
            "--sequences": str(config.engine.max_num_seqs),
            "--concurrency": str(config.worker.concurrency),
            "--batch-size": str(config.plan.batch_size),
            "--over-sample": str(config.strategy.over_sample_threshold),
            "--ahead": str(config.policy.max_ahead),
            "--staleness": str(config.policy.max_staleness),
            "--pause": config.policy.pause_mode,
            "--longest": str(task.sample.max_tokens),
        }.items()
    )
    assert (task.prompt_repeat_k, config.policy.sync_weights_interval) == (8, 1)  # its defaults
    done = in_process(*words, "--json")
    found = orjson.loads(done.stdout)["chosen"]
    shares = [100 * found[name] for name in ("worker_idle", "trainer_idle", "waste")]
    figures = [float(number) for number in re.findall(r"[\d.]+", said)]
    assert figures[0] == pytest.approx(found["step_s"], rel=0.01)
    assert figures[1:4] == pytest.approx(shares, abs=1)
    assert figures[4] == pytest.approx(found["staleness_mean"], abs=0.1)
    (hours,) = re.findall(r"^# Time: ([\d.]+) hours", text, re.M)
    assert float(hours) == pytest.approx(config.plan.steps * figures[0] / 3600, abs=0.06)


def test_evaluation_asks_every_line_of_a_jsonl_file(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text('{"question": "1"}\n\n{"question": "2"}', encoding="utf-8")
    where = f'tasks.held_out.dataset={{kind="jsonl", path="{file}"}}'
    path = CONFIGS / "demo.toml"
    assert load_config(path, [where]).evaluation_size("held_out") == 2
    asked = load_config(path, [where, "evaluation.groups=7"])
    assert asked.evaluation_size("held_out") == 7
    file.unlink()
    with pytest.raises(ConfigError, match=r"test\.jsonl"):
        load_config(path, [where]).evaluation_size("held_out")
    assert load_config(CONFIGS / "demo.toml").evaluation_size("held_out") == 500


def test_judges_that_a_config_may_name_are_those_that_exist() -> None:
    assert all(callable(load_object(judge.path, kind="judge")) for judge in named_judges().values())
