from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from rolloutmq.check.command import settings_findings
from rolloutmq.check.contained import STAGES, run_units, units_of
from rolloutmq.check.finding import Finding
from rolloutmq.check.memory import memory_findings, shape_of, trainer_bytes
from rolloutmq.config.config import Config
from rolloutmq.config.load import inspect_config
from tests.consumer.grpo.models.tiny import build_model
from tests.rolloutmq.conftest import ROOT, Command

CONFIG = Path(__file__).with_name("mistakes.toml").read_text(encoding="utf-8")
JUDGES = """
import os, sys, time
def score(response, ground_truth, state): return float(response == ground_truth)
def inf(response, ground_truth, state): return 1e39
def same(response, ground_truth, state): return 0.5
def hangs(response, ground_truth, state): time.sleep(600)
def leaves(response, ground_truth, state): os._exit(3)
def ends(response, ground_truth, state): sys.exit(2)
def stops(response, ground_truth, state): return next(iter(()))
def ranks(states): return [0.0]
"""
QUICK = "tasks.sums.judging={timeout_s=1.0}"
TEACHER = "tasks.sums.teachers={big={}}"
READ = "learner.distillation={}"
OTHER_TEACHER = (
    "tasks.more={judge='gsm8k', dataset={kind='jsonl', path='sums.jsonl'}, "
    "teachers={big={revision='v2', model='Qwen/none'}}}"
)
WITHOUT_REWARDS = ("trainer.advantages=none", "strategy.is_valid_sample_fn=not_all_equal")
SHORT_TEACHER = "tasks.sums.teachers={big={engine={kind='vllm', max_model_len=32}}}"
COLD = ("tasks.sums.sample.temperature=0.5", "learner.temperature=0.5")
VLLM = "engine={kind='vllm'}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a project without a mistake; it is the current one."""
    rows = [f'{{"question": "{n} + 1 =", "answer": "{n + 1}"}}' for n in range(24)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "my_judges.py").write_text(JUDGES, encoding="utf-8")
    (tmp_path / "mine.toml").write_text(CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def found(*overrides: str, stages: Sequence[str] = STAGES, section: str = "") -> Iterator[Finding]:
    """Findings about the project, from this process; `section`: only of its units in the stages."""
    config, problems = inspect_config(Path("mine.toml"), overrides)
    yield from settings_findings(config, problems, gpu_bytes=None)
    for stage in stages:
        for unit in units_of(stage, config):
            if section in ("", unit.section):
                yield from unit.findings()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model with random weights."""
    return build_model(tmp_path_factory.mktemp("models"), max_positions=128)


@pytest.fixture
def changed(model: Path, tmp_path: Path) -> Callable[..., Path]:
    def change(file: str = "config.json", **values: Any) -> Path:
        folder = tmp_path / "changed"
        if not folder.exists():
            shutil.copytree(model, folder)
        document = json.loads((folder / file).read_text(encoding="utf-8"))
        (folder / file).write_text(json.dumps(document | values), encoding="utf-8")
        return folder

    return change


def test_a_project_without_a_mistake(project: Path, model: Path) -> None:
    assert [each for each in found(f"policy.model={model}") if each.level != "ok"] == []
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "section", "part"),
    [
        # named when all was accepted, or when the run stood still
        (["tasks.sums.judge={gsm8k='gsm8k'}"], "data", "no judge for the data source ''"),
        (["tasks.sums.judge=my_judges:inf"], "judge", "1e+39"),
        (["launch={trainer_gpus=[0,1]}"], "machine", "names GPUs"),
        # a judge is a stranger's code
        (["tasks.sums.judge=my_judges:same"], "judge", "0.5 for its ground truth"),
        (["tasks.sums.judge=my_judges:hangs", QUICK], "judge", "exceeded its limit of 1 s"),
        (["tasks.sums.judge=my_judges:leaves"], "judge", "exit code 3"),
        (["tasks.sums.judge=my_judges:ends"], "judge", "SystemExit"),
        (["tasks.sums.judge=my_judges:stops"], "judge", "StopIteration"),
        # found half a minute after the start
        (["tasks.sums.judge=nowhere:score"], "functions", "module 'nowhere' cannot be imported"),
        (["tasks.sums.agent_loop=my_judges:nothing"], "functions", "has no 'nothing'"),
        (["learner.loss.objective=nowhere:loss"], "functions", "'nowhere' cannot be imported"),
        (["trainer.advantages=nowhere:rank"], "functions", "'nowhere' cannot be imported"),
        (["trainer.loop=nowhere:train"], "functions", "loop = nowhere:train"),
        (["policy.model=models/of/none"], "model", "no config.json"),
        (["run.name=mine"], "model", "there is no [policy] model"),
        (["engine.vocab_size=32000"], "model", "the model has 128 token ids"),
        (["engine.eos_token_id=128"], "model", "the model has 128 token ids"),
        (["policy.model=Qwen/none"], "model", "Qwen/none of the Hub is not on this machine"),
        (["tasks.sums.dataset={kind='hugging_face', path='openai/no'}"], "data", "openai/no of"),
        (["tasks.sums.dataset.path=none.jsonl"], "data", "cannot be opened"),
        (["engine={kind='transformers'}", "tasks.sums.sample.max_tokens=200"], "model", "context"),
        ([VLLM, "engine.max_model_len=4096"], "model", "exceeds what the model reads"),
        (["producer.max_prompt_tokens=3"], "data", "exceed [producer] max_prompt_tokens = 3"),
        # a teacher that could not score
        ([TEACHER, READ, "tasks.sums.teachers.big.model=models/of/none"], "model", "teacher big: no model folder"),
        ([TEACHER, READ, "tasks.sums.teachers.big.model=Qwen/none"], "model", "there is no folder Qwen/none here"),
        ([TEACHER, READ, "tasks.sums.teachers.big.revision=main"], "config", "revision = main"),
        ([TEACHER, READ, *COLD], "config", "sampled with temperature, and"),
        ([SHORT_TEACHER], "config", "teacher big: task sums"),
        ([TEACHER, "tasks.sums.sample.top_p=0.9"], "config", "sampled with top_p, and"),
        ([TEACHER, READ, OTHER_TEACHER], "config", "different values of model, revision"),
        ([TEACHER, READ, "engine={kind='http', url='http://x'}"], "config", "needs an engine"),
        # a teacher without an effect, and effects without a teacher
        ([TEACHER], "config", "nothing reads the logprobs of teacher big"),
        ([TEACHER, READ, "tasks.sums.teachers.big.top_k=8"], "config", "a teacher has top_k"),
        ([TEACHER, "learner.distillation.top_k_loss=forward"], "config", "a teacher with top_k"),
        ([TEACHER, "learner.distillation.coef=0"], "config", "coef = 0 without top_k_loss"),
        (["learner.loss.kl_coef=1", "learner.loss.kl_reference=big"], "config", "is no teacher"),
        (["tasks.sums.judge=none"], "config", "without a teacher, it teaches nothing"),
        (["trainer.advantages=none"], "config", "trains nothing without [learner.distillation]"),
        ([TEACHER, READ, *WITHOUT_REWARDS], "config", "not_all_equal of task sums"),
        # without an effect
        (["policy.max_staleness=1", "strategy.kind=sync"], "config", "which cannot act"),
        (["policy.max_staleness=1", "policy.pause_mode=abort"], "config", "throws the tokens"),
        (["evaluation.every_steps=50"], "config", "only the first and the last"),
        (["learner.warmup_steps=50"], "config", "never reaches learning_rate"),
        (["wandb.project=mine"], "config", "[wandb] cannot act"),
        (["learner.decay_steps=50"], "config", "never reaches final_rate"),
        (["trainer.max_sequence_tokens=6"], "data", "24 of 24 prompts fill"),
        (["policy.sync_weights_interval=50"], "config", "never get trained weights"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_is_found(project: Path, overrides: list[str], section: str, part: str) -> None:
    stage = {"config": [], "machine": [], "judge": ["data"]}.get(section, [section])
    wrong = [
        each for each in found(*overrides, stages=stage, section=section) if each.level != "ok"
    ]
    assert [each for each in wrong if each.section == section and part in each.what], wrong


def test_a_teacher_with_another_tokenizer_is_refused_by_its_first_other_token(
    project: Path, model: Path, tmp_path: Path
) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(model, teacher)
    given = [READ, f"policy.model={model}", f"tasks.sums.teachers={{big={{model='{teacher}'}}}}"]
    assert [each for each in found(*given, stages=["model"]) if each.level != "ok"] == []
    file = teacher / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = document["model"]["vocab"]
    (first, second) = sorted(vocabulary, key=vocabulary.__getitem__)[60:62]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(document), encoding="utf-8")
    (error,) = [each for each in found(*given, stages=["model"]) if each.level == "error"]
    assert f"token 60 is {first!r}" in error.what
    assert f"is {second!r} in {teacher}" in error.what


@pytest.mark.parametrize(
    ("judge", "truth", "said"),
    [
        ("gsm8k", None, "row 150: judge gsm8k: the ground truth None is no text"),
        ("gsm8k", "3-2", "row 150: judge gsm8k: the ground truth '3-2' holds no number"),
        ("exact_match", ["1", "2"], "judge exact_match: the ground truth ['1', '2'] is no text"),
        ("python_tests", {"input": ["1"], "output": []}, "judge python_tests: the test {"),
    ],
)
def test_a_ground_truth_that_no_answer_fits_is_found_behind_the_first_prompts(
    project: Path, judge: str, truth: Any, said: str
) -> None:
    right = "assert True" if judge == "python_tests" else "1"
    rows = [orjson.dumps({"question": "1?", "answer": right})] * 200
    rows[150] = orjson.dumps({"question": "1?", "answer": truth})
    (project / "sums.jsonl").write_bytes(b"\n".join(rows))
    (error,) = errors(f"tasks.sums.judge={judge}", section="data")
    assert said in error.what


def errors(*overrides: str, section: str) -> list[Finding]:
    every = found(*overrides, stages=["data"], section=section)
    return [each for each in every if each.section == section and each.level == "error"]


@pytest.mark.slow
def test_all_mistakes_of_all_sections_are_found_at_once(project: Path, command: Command) -> None:
    """Also behind code that ends the process which imports it, and in a config with mistakes."""
    (project / "ends.py").write_text("import os\nos._exit(4)", encoding="utf-8")
    wrong = ["plan.steps=none", "tasks.sums.judge=my_judges:inf", "trainer.advantages=gpro"]
    wrong += ["strategy.should_continue_fn=ends:rule", "strategy.is_valid_sample_fn=nowhere:keep"]
    flags = [part for each in wrong for part in ("--set", each)]
    done = command("check", "mine.toml", "--json", *flags, cwd=project)
    assert done.returncode == 1, done.stderr
    errors = [
        (each["section"], each["what"])
        for each in json.loads(done.stdout)["findings"]
        if each["level"] == "error"
    ]
    expected = [
        ("config", "plan.steps"),
        ("config", "trainer.advantages"),
        ("functions", "is_valid_sample_fn = nowhere:keep"),
        ("judge", "1e+39"),
    ]
    for section, part in expected:
        assert [what for where, what in errors if where == section and part in what], errors


def test_a_module_that_ends_the_process_or_hangs_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "ends.py").write_text("import os\nos._exit(4)", encoding="utf-8")
    (project / "sleeps.py").write_text("import time\ntime.sleep(600)", encoding="utf-8")
    monkeypatch.setattr("rolloutmq.check.contained.LIMIT_S", 3.0)
    wrong = ["strategy.is_valid_sample_fn=ends:keep", "strategy.should_continue_fn=sleeps:rule"]
    texts = [
        f"{each.level} {each.what}" for each in run_units(["functions"], ["mine.toml", *wrong])
    ]
    rule, keep, loop, judge = texts
    assert "is_valid_sample_fn = ends:keep: it ended the process" in keep
    assert "should_continue_fn = sleeps:rule: no end within 3 s" in rule
    assert (loop, judge) == ("ok agent_loop = single_turn", "ok judge = my_judges:score")


def test_the_formula_of_memory_md_is_the_one_that_is_computed(project: Path) -> None:
    """Qwen3-0.6B's row of docs/pages/many_gpus.md, without the activations: 12 GiB on one GPU."""
    config, _ = inspect_config(ROOT / "configs" / "gpu_check.toml")
    kept, _ = trainer_bytes(config, shape_of(config))
    assert kept / 2**30 == pytest.approx(12, abs=0.5)


@pytest.mark.parametrize(
    ("gigabytes", "overrides", "level"),
    [
        (80, [], "ok"),
        (None, ["engine.gpu_memory_utilization=0.1"], "ok"),
        (80, ["learner.token_budget=400000"], "warning"),  # its weights alone fit
        (10, [], "error"),
        (80, ["engine.gpu_memory_utilization=0.04"], "error"),  # the weights and nothing else
        (80, ["engine.kv_cache_memory_bytes=100000000000"], "error"),
        (80, ["launch.colocated=true"], "warning"),
        (80, ["launch.colocated=true", "engine.gpu_memory_utilization=0.5"], "ok"),
    ],
)
def test_memory_that_is_short_is_found(
    project: Path, gigabytes: int | None, overrides: list[str], level: str
) -> None:
    given = ["engine={kind='vllm'}", "launch.colocated=false", *overrides]
    config, _ = inspect_config(ROOT / "configs" / "gpu_check.toml", given)
    size = gigabytes and gigabytes * 10**9
    [finding] = memory_findings(config, shape_of(config), size)
    assert finding.level == level, finding
    assert bool(finding.fix) == (level != "ok")


@pytest.mark.parametrize(
    ("eos", "level"),
    [(None, "warning"), (128, "error"), ([3, 500], "error"), (1, "ok"), ([50, 1], "ok")],
)
def test_a_model_whose_responses_cannot_end_is_found(
    project: Path, changed: Callable[..., Path], eos: Any, level: str
) -> None:
    changed("generation_config.json", eos_token_id=eos)
    folder = changed("config.json", eos_token_id=eos)
    units = {unit.what: unit for unit in units_of("model", config_of(f"policy.model={folder}"))}
    wrong = [each for each in units[f"{folder}, its files"].findings() if each.level != "ok"]
    assert [each.level for each in wrong] == ([] if level == "ok" else [level])


def config_of(*overrides: str) -> Config:
    return inspect_config(Path("mine.toml"), overrides)[0]
