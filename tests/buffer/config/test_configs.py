"""Every example in configs/ is right to the last key, and configs/README.md names every key there
is.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from buffer.config.config import ConfigFile
from buffer.config.dataset import DatasetSection, ImagesSection
from buffer.config.engine import EngineConfig, VllmConfig
from buffer.config.learner import LoraConfig, LossConfig
from buffer.config.loader import load_config
from buffer.config.run import JUDGES, JudgingSection, SampleParamsSection, TaskSection
from buffer.config.trainer import TrainingConfig
from buffer.config.worker import ProducingConfig
from buffer.errors import ConfigError
from producer_workers.judges.load import BUILT_IN, load_judge, put_together

CONFIGS = Path(__file__).parents[3] / "configs"
FILES = sorted(CONFIGS.glob("*.toml"))
SIDES: list[type[ConfigFile]] = [ProducingConfig, TrainingConfig]


def both(path: Path, *overrides: str) -> tuple[ProducingConfig, TrainingConfig]:
    return load_config(ProducingConfig, path, overrides), load_config(
        TrainingConfig, path, overrides
    )


def test_all_examples_are_here() -> None:
    assert {path.name for path in FILES} >= {
        "demo.toml",
        "gpu_check.toml",
        "lora.toml",
        "qwen3_0.6b_gsm8k.toml",
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_example_loads_on_both_sides(path: Path) -> None:
    producing, training = both(path)
    assert producing.limits() == training.limits()
    for task in producing.tasks.values():
        put_together(task.judge, load_judge)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_key_of_an_example_is_checked_by_one_of_the_sides(path: Path) -> None:
    """A misspelt key, wherever it stands, is an error that suggests the right one."""
    for dotted in _keys(tomllib.loads(path.read_text(encoding="utf-8"))):
        *section, key = dotted
        wrong = ".".join([*section, f"{key}x"]) + "=1"
        problems = [problem for side in SIDES if (problem := _problem(side, path, wrong))]
        assert problems, f"{wrong} went unnoticed"
        if "config" not in section:  # the data set's own options
            assert any(f"did you mean `{key}`?" in problem for problem in problems), problems


def _keys(tree: dict[str, Any], *above: str) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _keys(value, *above, key)
        elif above[-1:] != ("config",):
            yield *above, key


def _problem(side: type[ConfigFile], path: Path, override: str) -> str:
    try:
        load_config(side, path, [override])
    except ConfigError as error:
        return str(error)
    return ""


def test_gpu_example_trains_on_gsm8k_with_files_of_its_own_for_the_test() -> None:
    producing, training = both(CONFIGS / "qwen3_0.6b_gsm8k.toml")
    train = training.tasks["gsm8k"]
    test = training.tasks["gsm8k_test"]
    assert train.dataset != test.dataset
    assert (train.judge, test.judge) == ("gsm8k", "gsm8k")
    assert (test.sample.temperature, test.prompt_repeat_k, test.shuffle) == (0.0, 1, False)
    assert isinstance(producing.engine, VllmConfig)
    longest = (producing.producer.max_prompt_tokens or 0) + train.sample.max_tokens
    assert longest <= (producing.engine.max_model_len or 0)
    assert longest <= training.learner.token_budget


def test_a_trainer_computes_with_the_temperature_that_was_sampled_with() -> None:
    warm = "tasks.chain_sum.sample.temperature=0.7"
    assert "task chain_sum is sampled with temperature 0.7" in _problem(
        TrainingConfig, CONFIGS / "demo.toml", warm
    )
    both(CONFIGS / "demo.toml", warm, "learner.temperature=0.7")
    both(CONFIGS / "demo.toml", warm, "trainer.loop=mine:train")


def test_evaluation_asks_every_line_of_a_jsonl_file(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text('{"question": "1"}\n\n{"question": "2"}', encoding="utf-8")
    where = f"tasks.gsm8k_test.dataset.path={file}"
    path = CONFIGS / "qwen3_0.6b_gsm8k.toml"
    assert load_config(TrainingConfig, path, [where]).evaluation_size("gsm8k_test") == 2
    assert (
        load_config(TrainingConfig, path, [where, "evaluation.groups=7"]).evaluation_size(
            "gsm8k_test"
        )
        == 7
    )
    with pytest.raises(ConfigError, match=r"test\.jsonl"):
        load_config(TrainingConfig, path).evaluation_size("gsm8k_test")
    assert load_config(TrainingConfig, CONFIGS / "demo.toml").evaluation_size("held_out") == 500


def test_judges_that_a_config_may_name_are_those_that_exist() -> None:
    assert set(JUDGES) == set(BUILT_IN)


# -- configs/README.md -------------------------------------------------------------------------------


def _models() -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section, by its name in a file."""
    for side in SIDES:
        for name, field in side.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield name, field.annotation
    yield "learner.loss", LossConfig
    yield "learner.lora", LoraConfig
    yield from (("engine", model) for model in get_args(get_args(EngineConfig)[0]))
    yield "tasks.<name>", TaskSection
    yield "tasks.<name>.sample", SampleParamsSection
    yield "tasks.<name>.judging", JudgingSection
    yield "tasks.<name>.dataset.images", ImagesSection
    yield from (("tasks.<name>.dataset", model) for model in get_args(get_args(DatasetSection)[0]))


def _documented() -> dict[str, set[str]]:
    """Keys by section, as the README's table has them: | `[section]` | … | `key`, `key` … |."""
    rows: dict[str, set[str]] = {}
    for line in (CONFIGS / "README.md").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\| `\[([^\]]+)\]`[^|]*\|([^|]*)\|([^|]*)\|", line):
            rows.setdefault(found[1], set()).update(re.findall(r"`([a-z_]\w*)`", found[3]))
    return rows


def test_readme_names_every_section_and_key_and_no_other() -> None:
    wanted: dict[str, set[str]] = {}
    for name, model in _models():
        wanted.setdefault(name, set()).update(model.model_fields)
    wanted["learner"] -= {"loss", "lora"}
    for part in ("sample", "dataset"):
        wanted["tasks.<name>"].discard(part)
    assert _documented() == wanted


def test_readme_names_every_file() -> None:
    text = (CONFIGS / "README.md").read_text(encoding="utf-8")
    names = [
        path.relative_to(CONFIGS).as_posix()
        for path in CONFIGS.rglob("*")
        if path.suffix in (".toml", ".jsonl")
    ]
    assert all(f"`{name}`" in text for name in names), names
