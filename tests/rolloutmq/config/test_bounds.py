from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ByteSize, TypeAdapter, ValidationError

from buffer.errors import ConfigError
from buffer.limits import RunLimits, TaskLimits
from buffer.run.settings import LiveSettings
from rolloutmq.config.config import Config
from rolloutmq.config.cross_section_rules import RULES, RULES_OF_TASKS, RULES_OF_TRAINING
from rolloutmq.config.load import inspect_config, load_config, validate_config
from tests.thoroughness import examples

WHOLE = Path(__file__).with_name("bounds.toml").read_text(encoding="utf-8")


def numbers(schema: Mapping[str, Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if schema.get("type") in ("integer", "number") and not {"const", "enum"} & schema.keys():
        yield where, schema
    if schema.get("anyOf") == TypeAdapter(ByteSize).json_schema()["anyOf"]:
        return  # pydantic enforces its bounds, and does not show them
    for key, value in schema.items():
        parts = value if isinstance(value, list) else [value]
        if key in ("properties", "$defs"):
            parts = []
            for name, part in value.items():
                yield from numbers(part, f"{where}.{name}")
        for part in parts:
            if isinstance(part, dict) and key != "default":
                yield from numbers(part, where)


@pytest.mark.parametrize("model", [Config, LiveSettings])
def test_every_number_has_a_lower_and_an_upper_bound(model: type[Config]) -> None:
    found = dict(numbers(model.model_json_schema(), model.__name__))
    assert len(found) > 10
    unbounded = [
        name
        for name, schema in found.items()
        if not ({"maximum", "exclusiveMaximum"} & schema.keys())
        or not ({"minimum", "exclusiveMinimum"} & schema.keys())
    ]
    assert unbounded == []


@pytest.mark.parametrize(
    "override",
    [
        "tasks.math.prompt_repeat_k=100000", "lease.lease_ms=90000000", "producer.slice_size=129",
        f"plan.steps={2**65}", "learner.betas=[0.9, 1.0]", "trainer.device=tpu",
        "memory.budget_bytes='-3'", "memory.budget_bytes='9999999TB'", "launch.trainer_gpus=[-1]",
        "evaluation.groups=1025", "tasks.sums.judge={}", 'tasks.sums.judge={"*" = {}}',
        'tasks.sums.judge={"*" = {gsm8k = 0.0}}',
    ],
)  # fmt: skip
def test_a_value_that_no_run_can_have_is_refused(tmp_path: Path, override: str) -> None:
    key = override.partition("=")[0].partition(".judge")[0]
    with pytest.raises(ConfigError, match=rf"1 problem\n  {key}"):
        load(tmp_path, WHOLE, override)


MASKED = "learner.allow_truncated_sampling=false"
VLLM = "engine={kind='vllm', max_model_len=4096}"
TRANSFORMERS = "engine={kind='transformers'}"


@pytest.mark.parametrize(
    "overrides",
    [
        [MASKED, TRANSFORMERS],
        [MASKED, VLLM, "tasks.sums.sample.top_k=1000", "tasks.math.sample.min_p=0.1",
         "tasks.sums_eval.sample.temperature=0.0"],
    ],
)  # fmt: skip
def test_sampling_may_be_cut_where_the_engine_records_what_that_leaves(
    tmp_path: Path, overrides: list[str]
) -> None:
    load(tmp_path, WHOLE, *overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["tasks.math.prompt_repeat_k=1"], "prompt_repeat_k = 1 of task math"),
        (["tasks.math.prompt_repeat_k=4096", "tasks.math.sample.max_tokens=9000"], "make groups of"),
        (["trainer.advantages=pass_at_k", "tasks.math.prompt_repeat_k=4"], "every advantage would be 0"),
        (["trainer.advantages=gdpo", "trainer.reward_weights={a=0.0}"], "reward_weights are all 0"),
        (
            ["trainer.advantages=pass_at_k", "trainer.overlong_buffer_tokens=64"],
            "overlong_buffer_tokens lowers the score",
        ),
        (
            [
                *("trainer.advantages=reinforce_pp", "tasks.math.prompt_repeat_k=1"),
                "strategy.is_valid_sample_fn=not_all_equal",
            ],
            "replaces every group of one rollout",
        ),
        (
            [
                "tasks.sums_eval={judge='none', dataset={kind='reasoning_gym', name='chain_sum'}}",
                "evaluation.every_steps=4",
            ],
            "every_steps cannot act",
        ),
        (["launch.trainer_gpus=[0, 1]", "launch.trainer_ranks=1"], "would be idle"),
        (["launch.trainer_gpus=[0, 0]"], "is not one GPU for each"),
        (["launch.trainer_gpus=[0, 1, 2]", "launch.trainer_ranks=2"], "is not one GPU for each"),
        (["launch.trainer_ranks=2", "trainer.device=cuda:1"], "several ranks"),
        (["learner.updates_per_batch=17"], "some updates would have none"),
        (["tasks.sums.dataset.held_out_size=2000"], "at most 1024"),
        (["tasks.sums.dataset.size=1"], "leave no problem"),
        (["memory.budget_bytes='1MiB'"], "cannot hold one checkpoint interval"),
        (['tasks.math.dataset.path="a\\u0000b"'], "the character NUL"),
        (["policy.order=shortest"], "expected 'staleness' or 'fifo'"),
        (["policy.model='/mine'", "policy.revision=v1"], "is for a model on the Hub"),
        (["retention.policy=last"], "needs batches = N"),
        (["learner.old_policy=current", "learner.loss.dual_clip=3.0"], "always 1"),
        (["learner.schedule=cosine"], "needs decay_steps"),
        (["launch.trainer_gpus=[0, 1]", "learner.optimizer=adamw_8bit"], "adamw_8bit"),
        (["trainer.advantages=gdpo"], "reward_weights names the parts"),
        (["trainer.reward_weights={right=1.0}"], "reward_weights names the parts"),
        (
            [
                *("trainer.advantages=gdpo", "trainer.reward_weights={right=1.0}"),
                "trainer.overlong_buffer_tokens=64",
            ],
            "overlong_buffer_tokens lowers the score",
        ),
        (["tasks.sums.train_roles=['solver']"], "gives no rollout a role"),
        (["tasks.sums.train_roles=['', 'solver']"], "gives no rollout a role"),
        (["critic.lam=0.95"], "advantages = gae only"),
        (["tasks.sums_eval.eval_of=sums_eval"], "not a training task: known: math, sums"),
        ([MASKED, "tasks.math.sample.top_p=0.9"], "top_p"),
        ([MASKED, TRANSFORMERS, "tasks.math.sample.presence_penalty=0.9"], "presence_penalty"),
        ([MASKED, VLLM], "whole vocabulary.*top_k of task sums"),
        ([VLLM, "engine.sampling_mask=true"], "whole vocabulary.*top_k of task sums"),
        (["memory.budget_bytes='8 gigs'"], "expected a number of bytes"),
        (["run.name=\udc80"], "not a text in UTF-8"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_together_are_refused(
    tmp_path: Path, overrides: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(tmp_path, WHOLE, *overrides)


def test_every_rule_can_be_asked_and_says_its_message(tmp_path: Path) -> None:
    """Also where its condition does not hold: a message names keys that exist."""
    config = load(tmp_path, WHOLE)
    for rule in RULES:
        assert not rule.is_broken(config)
        assert (rule.what + rule.hint).format(c=config)
    for rule in (*RULES_OF_TASKS, *RULES_OF_TRAINING):
        for name in config.training_tasks:
            task = config.tasks[name]
            assert not rule.is_broken(config, task, name)
            assert (rule.what + rule.hint).format(c=config, t=task, name=name, known="")


MISTAKES = {
    "run.seed=-1": "run.seed = -1",
    "lease.lease_ms=2.5": "lease.lease_ms = 2.5",
    "trainer.flow=colocated": "[trainer] flow = colocated needs",
    "tasks.sums.judge=nobody": 'tasks.sums.judge = "nobody"',
    "tasks.sums_eval.eval_of=nothing": 'eval_of = "nothing"',
    "tasks.math.sample.temperature=0.5": "task math is sampled with temperature 0.5",
    "critic.lam=2.0": "critic.lam = 2.0",
    "evaluation.flow=exclusive": "[evaluation] flow = exclusive needs",
    "launch.trainer_gpus=[1, 1]": "trainer_gpus = [1, 1]",
    "memory.low_water=0.95": "low_water = 0.95 must not exceed",
    "retention.batches=2": "batches is only used by",
}


@given(st.sets(st.sampled_from(sorted(MISTAKES)), min_size=2, max_size=4))
@settings(max_examples=examples(25), deadline=None)
@example({"evaluation.flow=exclusive", "tasks.sums.judge=nobody"})  # no task is left to evaluate
def test_all_mistakes_are_reported_at_once(mistakes: set[str]) -> None:
    tree = tomllib.loads(WHOLE)
    for mistake in mistakes:
        put(tree, mistake)
    with pytest.raises(ConfigError) as caught:
        validate_config(tree, "file")
    assert f"{len(mistakes)} problems" in str(caught.value)
    assert [m for m in sorted(mistakes) if MISTAKES[m] not in str(caught.value)] == []


def test_a_wrong_value_is_not_compared_with_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 problem\n"):
        load(tmp_path, WHOLE, "learner.temperature=hot", "tasks.math.sample.temperature=0.7")


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 1, 2**31, 2**53, 2**63, 2**64, -(2**64), 10**30])
    | st.sampled_from([0.0, -0.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")])
    | st.sampled_from(["", " ", "\x00", "é" * 300, "a:b", "http://[", "8GiB", "1e999GiB"])
    | st.text(st.characters(codec="utf-8"), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=3), inner, max_size=2)
    ),
    max_leaves=3,
)


def key_paths() -> list[tuple[str, ...]]:
    schema = Config.model_json_schema()
    found: list[tuple[str, ...]] = []

    def walk(node: Any, path: tuple[str, ...]) -> None:
        found.append(path)
        for member in (node, *node.get("anyOf", ()), *node.get("oneOf", ())):
            if "$ref" in member:
                walk(schema["$defs"][member["$ref"].rpartition("/")[2]], path)
            for name, inner in member.get("properties", {}).items():
                walk(inner, (*path, name))
            inner = member.get("additionalProperties")
            if isinstance(inner, dict) and "$ref" in inner:
                for task in ("math", "sums", "sums_eval"):
                    walk(inner, (*path, task))

    walk(schema, ())
    return sorted({path for path in found if path})


@given(st.lists(st.tuples(st.sampled_from(key_paths()), ANYTHING), min_size=1, max_size=3))
@settings(max_examples=examples(150), deadline=None)
def test_no_value_of_any_key_ends_in_a_traceback(
    changes: list[tuple[tuple[str, ...], Any]],
) -> None:
    tree = tomllib.loads(WHOLE)
    for (*parents, key), value in changes:
        node: Any = tree
        for name in parents:
            node = node.setdefault(name, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node[key] = deepcopy(value)
    try:
        config = validate_config(tree, "file")
    except ConfigError:
        return
    config.memory_problem(config.memory.budget(2**34))
    list(config.warnings())
    meta = config.limits().to_meta()
    assert RunLimits.from_meta(dict(zip(meta[::2], meta[1::2], strict=True))) == config.limits()


@pytest.mark.parametrize(
    "wrong",
    [
        {"stale_threshold": -1},
        {"token_threshold": 0},
        {"stale_threshold": 2, "token_threshold": 3},
        {"batch_size": 0},
        {"lease_ms": -5},
        {"low_bytes": -1},
        {"low_bytes": 5, "high_bytes": 4},
        {"steps": 2**65},
        {"tasks": {"math": TaskLimits(), "quiz": TaskLimits(eval_of="maths")}},
    ],
)
def test_limits_that_no_run_can_have_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RunLimits(**wrong)


def load(folder: Path, text: str, *overrides: str) -> Config:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def put(tree: dict[str, Any], assignment: str) -> None:
    key, _, text = assignment.partition("=")
    *parents, last = key.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
    try:
        tree[last] = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        tree[last] = text


DEEP = 3000


@pytest.mark.parametrize(
    "text",
    [
        f"x = {'[' * DEEP}{']' * DEEP}",
        f"[{'.'.join('a' * DEEP)}]",
        f"x = {'{a = ' * DEEP}1{'}' * DEEP}",
    ],
    ids=["arrays", "tables", "inline tables"],
)
def test_deeply_nested_file_is_a_mistake(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nested"):
        load(tmp_path, text)
    path = tmp_path / "run.toml"
    with pytest.raises(ConfigError, match="nested"):
        inspect_config(path)
    key, _, value = text.partition(" = ")
    if value:
        with pytest.raises(ConfigError, match="nested"):
            load(tmp_path, '[run]\nname = "x"\n', f"run.{key}={value}")
