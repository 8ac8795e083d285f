from __future__ import annotations

import re
from pathlib import Path

import pytest

from buffer.errors import ConfigError
from rolloutmq.config.load import inspect_config
from rolloutmq.init.command import KINDS, TINY, Choices, write_project
from rolloutmq.presets import find_config, preset_names, presets_folder
from tests.programs import ROOT, python
from tests.rolloutmq.conftest import Command, in_process

CHECK = """
import gc
import os
import sys
from pathlib import Path
import pytest
# what every project needs, imported once
import fakeredis
import producer_workers.build
from consumer.grpo.models import model_folder
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3 import modeling_qwen3
from rolloutmq import rehearse
from rolloutmq.config.load import inspect_config
from rolloutmq.check.contained import STAGES, units_of


def check():
    assert pytest.main(["-q", "-p", "no:cacheprovider", "."]) == 0
    config, problems = inspect_config(Path("config.toml"))
    found = [
        each for stage in STAGES for unit in units_of(stage, config) for each in unit.findings()
    ]
    wrong = [*problems, *(each for each in found if each.level != "ok")]
    sys.exit(str(wrong) if wrong else 0)


os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
gc.freeze()
for project in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os.chdir(project)
        sys.path.insert(0, project)
        check()
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(project)
"""
"""The own test of each project, and the stages of `rolloutmq check`, in a process each."""


def test_a_project_is_written_only_into_an_empty_folder(command: Command, tmp_path: Path) -> None:
    done = command("init", "mine", "--template", "tools", "--gpus", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config, problems = inspect_config(tmp_path / "mine" / "config.toml")
    assert (problems, config.warnings()) == ([], [])
    assert (config.launch.trainer_gpus, config.launch.worker_gpus) == ([0, 1], [2, 3])
    assert str(config.policy.model) == "Qwen/Qwen3-0.6B"
    again = command("init", "mine", "--template", "math", cwd=tmp_path)
    assert again.returncode == 2
    assert "is not empty" in again.stderr


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ([], "--template"),
        (["--template", "maths"], "known: math, code, tools, agent"),
        (["--template", "math", "--data", "none.jsonl"], "there is no such file"),
    ],
)
def test_a_wrong_choice_is_refused_before_anything_is_written(
    command: Command, tmp_path: Path, flags: list[str], part: str
) -> None:
    done = command("init", "mine", *flags, cwd=tmp_path)
    assert done.returncode == 2
    assert part in done.stderr
    assert not (tmp_path / "mine").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_projects_pass_their_tests_and_the_check(tmp_path: Path) -> None:
    for template in KINDS:
        write_project(tmp_path / template, Choices(template, TINY, None, 0))
        assert "$" not in (tmp_path / template / "config.toml").read_text(encoding="utf-8")
    projects = [tmp_path / template for template in KINDS]
    python("-c", CHECK, *projects, cwd=tmp_path, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")


def test_a_file_comes_before_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demo = presets_folder() / "demo.toml"
    for name in ("demo", "demo.toml", "configs/demo.toml", "configs/demo"):
        assert find_config(Path(name)) == demo
    Path("demo.toml").touch()
    assert find_config(Path("demo.toml")) == Path("demo.toml")
    assert find_config(Path("demo")) == demo
    with pytest.raises(ConfigError):
        find_config(Path("other/demo.toml"))


def test_an_unknown_name_is_answered_with_the_presets(tmp_path: Path) -> None:
    done = in_process("run", "qwen3_600b", cwd=tmp_path)
    assert done.returncode == 2
    assert "qwen3_600b: there is no such file, and no preset of that name" in done.stderr
    listed = re.findall(r"[\w.]+", done.stderr.partition("one of ")[2])
    assert listed == preset_names()
