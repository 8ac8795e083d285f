from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.errors import DatasetError
from buffer.wire.group import RolloutGroup
from buffer.wire.group_bytes import decode, encode
from buffer.wire.rollout import RolloutState, Status
from buffer.wire.sampling import SampleParams, StructuredOutput
from producer_workers.agent_loops.tokenizer import TaskTokenizer
from producer_workers.datasets.files import JsonlDataset
from producer_workers.datasets.records import RecordsDataset, load_to_problem
from producer_workers.producer.sampler import Sampler, TooLong


@pytest.fixture
def rows(tmp_path: Path) -> JsonlDataset:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(f'{{"prompt": "{"7" * n}?", "answer": {n}, "level": {n}}}\n' for n in range(6))
    )
    return JsonlDataset(path)


def make(
    rows: RecordsDataset, tokenizer: Any, sample: SampleParams | None = None, **options: Any
) -> Sampler:
    options = {"prompt_repeat_k": 4, "seed": 3} | options
    return Sampler("math", rows, tokenizer, sample or SampleParams(), **options)


def drawn(sampler: Sampler, number: int) -> list[RolloutState]:
    states = sampler.draw(number)
    assert isinstance(states, list)
    return states


def dumped(sampler: Sampler, number: int) -> list[str]:
    return [repr(state.model_dump()) for state in drawn(sampler, number)]


def test_a_row_whose_source_has_no_judge_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "sources.jsonl"
    path.write_text('{"prompt": "1?", "data_source": "code/py"}\n{"prompt": "2?"}\n')
    rows = JsonlDataset(path)
    sampler = make(rows, tokenizer, shuffle=False, judge={"code/*": "none"})
    assert drawn(sampler, 0)[0].data_source == "code/py"
    with pytest.raises(DatasetError, match="row 1: no judge for the data source ''"):
        sampler.draw(1)
    assert drawn(make(rows, tokenizer, shuffle=False, judge={"code/*": "none", "*": "none"}), 1)
    assert drawn(make(rows, tokenizer, shuffle=False), 1), "one judge for all sources"


GAP = float("nan")


@pytest.mark.parametrize(
    ("judge", "taken", "refused"),
    [
        ("exact_match", ["18", 18, 18.0, ["18"], "None"], [None, GAP, "", b"18", [], ["1", "2"], {}]),
        (
            "gsm8k",
            ["18", 18.0, ["18"], "2+2=4\n#### 4"],
            [None, GAP, b"18", "3-2", "unknown", [1, 2]],
        ),
        ("math_verify", ["x^2", 0.5, "3-2", "Monday"], [None, GAP, float("-inf"), b"18", " "]),
        ("python_tests", ["assert f(1) == 1", ["f()"], [{"input": 1, "output": "1"}]], [None, "18", [1], {}]),
        ("reasoning_gym", [None, GAP, {"a": 1}], []),
        ("my_module:score", [None, GAP, b"18"], []),
        ({"a": "exact_match", "*": {"gsm8k": 1.0, "none": 0.5}}, ["18"], ["B", None]),
    ],
)  # fmt: skip
def test_a_row_whose_ground_truth_no_answer_fits_is_refused(
    tokenizer: Any, judge: Any, taken: list[Any], refused: list[Any]
) -> None:
    """NaN is a gap in a column of floats."""
    records = [{"prompt": "1?", "ground_truth": truth} for truth in (*taken, *refused)]
    rows = RecordsDataset(records, "rows", load_to_problem(None))
    sampler = make(rows, tokenizer, shuffle=False, judge=judge)
    for draw in range(len(taken)):
        assert drawn(sampler, draw)
    for draw in range(len(taken), len(records)):
        with pytest.raises(DatasetError, match=rf"row {draw}: judge \w+: the (ground truth|test) "):
            sampler.draw(draw)


def test_a_row_that_ends_with_an_answer_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    """The template would close the answer, and the model would begin a second one behind it."""
    path = tmp_path / "answered.jsonl"
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is"}]
    path.write_bytes(orjson.dumps({"messages": messages}))
    with pytest.raises(DatasetError, match="row 0: the conversation ends with a message"):
        make(JsonlDataset(path), tokenizer).draw(0)


def test_draw_makes_k_rollouts_of_one_prompt(rows: JsonlDataset, tokenizer: Any) -> None:
    states = drawn(make(rows, tokenizer), 0)
    assert [state.index for state in states] == [0, 1, 2, 3]
    assert {state.status for state in states} == {Status.INIT}
    row = states[0].extra["row"]
    assert states[0].messages == [{"role": "user", "content": "7" * row + "?"}]
    assert (states[0].ground_truth, states[0].extra["level"], states[0].extra["epoch"]) == (
        row,
        row,
        0,
    )


def test_draw_has_the_system_prompt_of_the_task_and_its_template_arguments(
    rows: RecordsDataset, tokenizer: Any
) -> None:
    told = TaskTokenizer(tokenizer, {"add_special_tokens": False}, "be brief")
    state = drawn(make(rows, told, system_prompt="be brief"), 0)[0]
    assert [message["role"] for message in state.messages] == ["system", "user"]
    text = tokenizer.decode(state.prompt_ids)
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n7")
    assert text.count("be brief") == 1


def test_draws_of_an_epoch_visit_every_row_and_the_next_epoch_follows(
    rows: RecordsDataset, tokenizer: Any
) -> None:
    extras = [drawn(make(rows, tokenizer), number)[0].extra for number in range(12)]
    assert [extra["epoch"] for extra in extras] == [0] * 6 + [1] * 6
    assert sorted(extra["row"] for extra in extras[:6]) == sorted(
        extra["row"] for extra in extras[6:]
    )
    assert {e["row"]: e["prompt_hash"] for e in extras[:6]} == {
        e["row"]: e["prompt_hash"] for e in extras[6:]
    }
    assert len({extra["prompt_hash"] for extra in extras}) == 6


def test_draw_is_the_same_when_made_by_another_sampler(rows: JsonlDataset, tokenizer: Any) -> None:
    first, second = (make(rows, tokenizer, SampleParams(seed=1)) for _ in range(2))
    for number in (0, 5, 6, 1_000_003):
        assert dumped(first, number) == dumped(second, number)


def test_every_rollout_has_a_seed_of_its_own_when_the_task_has_one(
    rows: RecordsDataset, tokenizer: Any
) -> None:
    def seeds(sampler: Sampler) -> list[int | None]:
        return [
            state.sample_params.seed for number in range(20) for state in drawn(sampler, number)
        ]

    params = SampleParams(seed=9, temperature=0.7)
    made = seeds(make(rows, tokenizer, params))
    assert len(set(made)) == 80
    assert all(seed is not None and 0 <= seed < 2**31 for seed in made)
    assert seeds(make(rows, tokenizer, params, seed=4)) != made
    assert drawn(make(rows, tokenizer, params), 0)[0].sample_params.temperature == 0.7


def test_draw_is_too_long_when_its_prompt_is(rows: JsonlDataset, tokenizer: Any) -> None:
    lengths = [len(encoded(drawn(make(rows, tokenizer, shuffle=False), n)[0])) for n in range(6)]
    sampler = make(rows, tokenizer, shuffle=False, max_prompt_tokens=lengths[4])
    assert isinstance(sampler.draw(4), list)
    assert sampler.draw(5) == TooLong(5, sampler.place(5))


def encoded(state: RolloutState) -> list[int]:
    assert state.prompt_ids is not None
    return list(state.prompt_ids)


def test_draw_names_the_row_when_the_template_refuses_it(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": [{"role": "robot", "content": "hi"}]}\n')
    with pytest.raises(
        DatasetError, match=r"math: row 0 does not fit the chat template: no such role: robot"
    ):
        make(JsonlDataset(path), tokenizer).draw(0)


def test_draw_refuses_a_row_when_its_columns_have_names_of_ours(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "hi", "epoch": 3}\n')
    with pytest.raises(DatasetError, match=r"row 0 uses the names \['epoch'\]"):
        make(JsonlDataset(path), tokenizer).draw(0)


def test_draw_keeps_a_row_to_its_own_structure_and_any_other_to_the_tasks(
    tmp_path: Path, tokenizer: Any
) -> None:
    """Accept structures as an object, as the text of a table, or none, with a seed per rollout."""
    path = tmp_path / "rows.jsonl"
    given = [{"choice": ["yes", "no"]}, '{"json_schema": {"type": "object"}}', None]
    lines = [
        orjson.dumps({"prompt": str(number), "structured": row}) for number, row in enumerate(given)
    ]
    path.write_bytes(b"\n".join(lines))
    of_task = StructuredOutput(regex="a+")
    sampler = make(
        JsonlDataset(path), tokenizer, SampleParams(structured=of_task, seed=1), shuffle=False
    )
    expected = [
        StructuredOutput(choice=["yes", "no"]),
        StructuredOutput(json_schema={"type": "object"}),
        of_task,
    ]
    for number, structured in enumerate(expected):
        states = decode(
            encode(RolloutGroup(sampler.gid(number), "math", drawn(sampler, number)))
        ).states
        assert [state.sample_params.structured for state in states] == [structured] * 4
        assert len({state.sample_params.seed for state in states}) == 4
        assert "structured" not in states[0].extra
