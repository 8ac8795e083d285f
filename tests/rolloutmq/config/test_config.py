from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer.config.assignments import parse_settings
from buffer.config.removed import COMMANDS, SETTINGS
from buffer.config.run_settings import PolicySection, RedisSection
from buffer.config.section import Section, meanings
from buffer.errors import ConfigError
from buffer.limits import RunLimits
from buffer.run.settings import LiveSettings
from producer_workers.build import task_names
from producer_workers.config.dataset import JsonlSection
from rolloutmq.config.config import Config
from rolloutmq.config.load import load_config, validate_config

GOOD = Path(__file__).with_name("config.toml").read_text(encoding="utf-8")
HELD_OUT = '[tasks.math_eval]\neval_of = "math"\n'


def load(folder: Path, text: str, *overrides: str) -> Config:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def problems(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    assert str(folder / "run.toml") in str(caught.value) or "--set" in str(caught.value)
    return str(caught.value)


def test_what_cannot_change_in_a_run_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ConfigError,
        match="group_time_limit_s: cannot change while a run continues: each worker reads",
    ):
        parse_settings(LiveSettings, ["tasks.math.group_time_limit_s=3"])


def test_every_field_of_every_section_is_described() -> None:
    bare = [
        f"{section.__name__}.{field}"
        for section in subclasses(Section)
        for field, meaning in meanings(section).items()
        if not meaning
        and section is not Config
        and section.__module__.split(".")[0]
        in ("buffer", "producer_workers", "consumer", "rolloutmq")
    ]
    assert bare == []


def subclasses(kind: type[Section]) -> Iterator[type[Section]]:
    for found in kind.__subclasses__():
        yield found
        yield from subclasses(found)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[run]\nname = 'x'\nsede = 1\n", "run.sede: unknown key; did you mean `seed`?"),
        ("[run]\nname = 'x'\nlease_ms = 1\n", "run.lease_ms: unknown key; it belongs in [lease]"),
        ("[run]\nname = 'x'\n[polcy]\n", "polcy: unknown key; did you mean `policy`?"),
        ("[tasks.a.dataset]\nkind = 'jsonl'\npth = 'x'\n", "tasks.a.dataset.pth: unknown key; did you mean `path`?"),
        (
            "[engine]\nkind = 'simulated'\nomp_threads = 1\n",
            'it belongs to kind = "vllm", and engine has kind = "simulated": remove it, '
            "or replace the section: --set 'engine={kind=\"simulated\"}'",
        ),
        ("[tasks.a.dataset]\nkind = 'jsonl'\n", "tasks.a.dataset.path: missing"),
        ("[tasks.a.dataset]\nkind = 'csv'\n", "tasks.a.dataset.kind = \"csv\": expected 'jsonl', 'parquet',"),
        ("[tasks.a.dataset]\npath = 'x'\n", "tasks.a.dataset.kind: missing"),
        ("[tasks.a]\njudge = 'reasoning_gim'\n", 'tasks.a.judge = "reasoning_gim": expected reasoning_gym,'),
        ("[tasks.'a b']\n", 'tasks."a b"'),
        ("[run]\nname = '../x'\n", 'run.name = "../x": expected letters'),
        ("[redis]\nurl = 'http://x'\n", "expected a URL that starts with redis://"),
        ("[lease]\nheartbeat_ms = 5000\n", "must be at most a third of lease_ms = 10000"),
        (
            "[policy]\nmax_token_staleness = 17\n",
            "policy.max_token_staleness = 17: expected at most max_staleness = 16",
        ),
        ("[policy]\nmax_staleness = 1.0\n", "policy.max_staleness = 1.0: expected a valid integer"),
        ("[strategy]\nover_sample_threshold = nan\n", "expected a finite number"),
        ("[strategy]\nenable_partial_rollout = 1\n", "expected a valid boolean"),
        ('[run]\nname "demo"\n', 'line 2: name "demo"'),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_what_would_be_right(tmp_path: Path, text: str, told: str) -> None:
    assert told in problems(tmp_path, text)


def test_a_missing_file_and_a_binary_file_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(tmp_path / "binary.toml")


def test_passwords_are_masked_wherever_a_value_is_shown(tmp_path: Path) -> None:
    assert "hunter2" not in problems(tmp_path, GOOD + '[redis]\nurl = "http://me:hunter2@host"\n')
    assert "hunter2" not in problems(tmp_path, "[redis]\nurl redis://me:hunter2@host\n")
    assert "hunter2" not in problems(
        tmp_path, GOOD, "redis.url.x=redis://me:hunter2@h", "redis.url=1"
    )
    assert "hunter2" not in repr(RedisSection(url="redis://me:hunter2@host"))


def test_set_overrides_the_file_with_toml_values_and_bare_words(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        GOOD,
        "lease.lease_ms=60_000",
        "policy.pause_mode=abort",
        'tasks."math".sample.stops=["\\n"]',
        "tasks.math.weight=2",
        "tasks.math.judge=my_judges.sums:score",
        "redis.url=unix:///tmp/x?db=1",
    )
    assert config.lease.lease_ms == 60_000
    assert config.lease.worker_timeout_ms == 180_000
    assert config.policy.pause_mode == "abort"
    assert config.tasks["math"].sample.stops == ["\n"]
    assert config.tasks["math"].weight == 2.0
    assert config.tasks["math"].judge == "my_judges.sums:score"
    assert config.redis.url == "unix:///tmp/x?db=1"


@pytest.mark.parametrize(
    "override", ["lease", "=3", "a b=3", "run.name.first=3", "run.seed=1\nname=2\n=", "[x]=3"]
)
def test_set_of_nonsense_is_a_config_error(tmp_path: Path, override: str) -> None:
    problems(tmp_path, GOOD, override)


def test_an_eval_task_inherits_from_its_training_task_and_is_greedy(tmp_path: Path) -> None:
    task = load(tmp_path, GOOD + HELD_OUT).tasks["math_eval"]
    training = load(tmp_path, GOOD).tasks["math"]
    assert (task.prompt_repeat_k, task.sample.temperature, task.weight) == (1, 0.0, 0.0)
    assert (task.lane, task.split) == ("eval", "held_out")
    assert (task.dataset, task.judge) == (training.dataset, training.judge)
    assert task.sample.max_tokens == training.sample.max_tokens == 64


def test_an_eval_task_may_bring_a_data_set_of_its_own(tmp_path: Path) -> None:
    own = load(
        tmp_path, GOOD + HELD_OUT + 'dataset = { kind = "jsonl", path = "x.jsonl" }\n'
    ).tasks["math_eval"]
    assert own.dataset == JsonlSection(kind="jsonl", path=Path("x.jsonl"))


def test_the_url_comes_from_the_flag_then_the_environment_then_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://environment")
    assert RedisSection(url="redis://config").resolve_url("redis://flag") == "redis://flag"
    assert RedisSection(url="redis://config").resolve_url() == "redis://environment"
    monkeypatch.delenv("REDIS_URL")
    assert RedisSection(url="redis://config").resolve_url() == "redis://config"
    assert RedisSection().resolve_url() is None


def test_order_and_retention_reach_the_limits_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(GOOD, encoding="utf-8")
    limits = load_config(path).limits()
    assert (limits.order, limits.retain_batches, limits.retain_until_exported) == (
        "staleness",
        0,
        False,
    )
    changes = ("policy.order=fifo", "retention.policy=export", "retention.batches=3")
    limits = load_config(path, changes).limits()
    assert (limits.order, limits.retain_batches, limits.retain_until_exported) == ("fifo", 3, True)
    assert RunLimits.from_meta(dict(batched(limits.to_meta()))) == limits


def batched(pairs: list[str]) -> list[tuple[str, str]]:
    return list(zip(pairs[::2], pairs[1::2], strict=True))


def test_template_arguments_may_not_change_what_a_prompt_is(tmp_path: Path) -> None:
    config = load(
        tmp_path, GOOD + HELD_OUT, "tasks.math.chat_template_kwargs={enable_thinking=false}"
    )
    assert config.tasks["math_eval"].chat_template_kwargs == {"enable_thinking": False}
    told = problems(tmp_path, GOOD, "tasks.math.chat_template_kwargs={tokenize=false}")
    assert "tokenize cannot be set" in told


def test_lengths_that_do_not_fit_the_context_are_refused(tmp_path: Path) -> None:
    context = ("engine.kind=vllm", "engine.max_model_len=128")
    assert load(tmp_path, GOOD, *context, "producer.max_prompt_tokens=64")
    told = problems(tmp_path, GOOD, *context, "producer.max_prompt_tokens=65")
    assert "128 tokens (max_model_len), which is too small for sample.max_tokens = 64 and" in told
    told = problems(tmp_path, GOOD, *context, "tasks.math.sample.max_tokens=128")
    assert "too small for sample.max_tokens = 128: lower" in told
    # an agent's requests share max_tokens, and a default that nobody set is not a demand
    load(tmp_path, GOOD, *context, "tasks.math.sample.max_tokens=999", "worker.agent_loop=gateway")
    load(tmp_path, GOOD.replace("max_tokens = 64", ""), *context)


def test_live_tasks_are_served_by_gateways_alone(tmp_path: Path) -> None:
    other = '\n[tasks.chat]\nagent_loop = "live"\njudge = "environment"\n'
    other += '[tasks.chat.dataset]\nkind = "jsonl"\npath = "chat.jsonl"\n'
    both = load(tmp_path, GOOD + other)
    assert (task_names(both, "worker"), task_names(both, "gateway")) == (["math"], ["chat"])
    for command, loop in (("gateway", "single_turn"), ("worker", "live")):
        with pytest.raises(ConfigError, match="no task"):
            task_names(load(tmp_path, GOOD, f"worker.agent_loop={loop}"), command)


def test_stale_threshold_counts_train_steps() -> None:
    assert PolicySection(max_staleness=0, sync_weights_interval=4).stale_threshold == 4
    assert PolicySection(max_staleness=1, sync_weights_interval=4).stale_threshold == 8
    assert PolicySection(max_staleness=1, sync_weights_interval=4).token_threshold is None
    assert (
        PolicySection(
            max_staleness=2, max_token_staleness=1, sync_weights_interval=4
        ).token_threshold
        == 8
    )


def test_a_task_may_have_a_staleness_limit_of_its_own(tmp_path: Path) -> None:
    text = GOOD + HELD_OUT + "[tasks.math.strategy]\nover_sample_threshold = 0.5\n"
    sets = ("policy.max_staleness=1", "policy.sync_weights_interval=2", "evaluation.every_steps=2")
    limits = load(tmp_path, text, *sets).limits()
    assert [limits.threshold(task) for task in ("math", "math_eval")] == [4, None]
    limits = load(tmp_path, text, *sets, "tasks.math.max_staleness=3").limits()
    assert [limits.threshold(task) for task in ("math", "math_eval")] == [8, None]
    assert limits.horizon_of(1) == 4
    limits = load(tmp_path, text, *sets, "tasks.math.max_ahead=0").limits()
    assert (limits.threshold("math"), limits.horizon_of(1)) == (4, 2)
    found = problems(
        tmp_path, text, *sets, "tasks.math.max_staleness=0", "policy.max_token_staleness=1"
    )
    assert "[tasks.math] max_staleness = 0" in found


def test_staleness_without_partial_rollouts_under_abort_is_warned_about(tmp_path: Path) -> None:
    abort = "policy.pause_mode=abort"
    fresh = "policy.max_staleness=0"
    (warning,) = load(tmp_path, GOOD, abort).warnings()
    assert "task math has max_staleness = 16" in warning
    assert load(tmp_path, GOOD, abort, fresh).warnings() == []
    assert load(tmp_path, GOOD).warnings() == []
    assert load(tmp_path, GOOD, abort, "strategy.enable_partial_rollout=true").warnings() == []


def test_more_groups_than_a_batch_save_no_time_where_the_trainer_waits_for_all(
    tmp_path: Path,
) -> None:
    more, fresh = "strategy.over_sample_threshold=0.5", "policy.max_staleness=0"
    (warning,) = load(tmp_path, GOOD, more, fresh).warnings()
    assert "saves no time" in warning
    assert load(tmp_path, GOOD, more).warnings() == []
    assert load(tmp_path, GOOD, more, fresh, "strategy.on_straggler=drop").warnings() == []


def test_keys_that_are_lists_are_read_beside_an_attached_section(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        GOOD,
        'trainer.writers=["wandb"]',
        "learner.betas=[0.5, 0.5]",
        "tiny_model.phrases=[]",
        "gateway.port=80",
        "gateway.ports=8",
    )
    assert (config.trainer.writers, config.learner.betas) == (("wandb",), (0.5, 0.5))
    assert config.attached["gateway"].ports == 8
    assert "need as many [gateway] ports" in problems(
        tmp_path, GOOD, "gateway.port=80", "launch.workers=2"
    )
    assert "gateway.hosts: unknown" in problems(tmp_path, GOOD, "gateway.hosts=x")


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_removed_setting_is_refused_with_what_to_use_instead(setting: str) -> None:
    key, _, value = setting.partition(" = ")
    tree: dict[str, object] = {"run": {"name": "old"}, "tasks": {}}
    node = tree
    *sections, last = key.replace("*", "math").split(".")
    for section in sections:
        node = node.setdefault(section, {})  # type: ignore[assignment]
    node[last] = value.strip('"') or "anything"
    with pytest.raises(ConfigError) as error:
        validate_config(tree, "old.toml")
    assert f"{key.replace('*', 'math')}: {SETTINGS[setting]}" in error.value.message


@pytest.mark.parametrize("command", COMMANDS)
def test_a_removed_command_is_refused_with_what_to_use_instead(command: str) -> None:
    call = [sys.executable, "-m", "rolloutmq", *command.split()]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert COMMANDS[command] in " ".join(done.stderr.split())
