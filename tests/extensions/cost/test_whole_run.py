"""A whole run with a judge by a language model and a worker that is killed: its costs."""

from __future__ import annotations

import json
from collections.abc import Callable

import orjson
import pytest

from tests.extensions.llm_judge.service import judging_model
from tests.pipeline.site import Site

PRICES = """
[cost]
currency = "EUR"
million_sampled_tokens = 2.0
[tasks.sums.llm]
url = "{url}"
model = "m"
repeat_share = 0.0
million_prompt_tokens = 1.0
million_completion_tokens = 3.0
"""


@pytest.mark.slow
def test_tokens_of_engine_and_judge_are_counted_and_priced_though_a_worker_dies(
    make_site: Callable[..., Site],
) -> None:
    def grade(_: str, number: int) -> str:
        return json.dumps({"reason": "so", "grade": number % 11})

    site = make_site(steps=4, held=1)
    with judging_model(grade) as model:
        text = site.config.read_text(encoding="utf-8")
        text = text.replace("tests.pipeline.judges:by_chance", "llm")
        site.config.write_text(text + PRICES.format(url=model.url), encoding="utf-8")
        run = site.start("run")
        site.until_held()
        run.child("worker").kill()
        site.let_go()
        assert run.wait() == 0, run.said()

    def said(*words: str) -> str:
        process = site.start_words(*words, "--run-dir", str(site.run_dir))
        assert process.wait() == 0, process.said()
        return process.said()

    told = said("cost", "--json")
    found = orjson.loads(told[told.index("{\n") :])
    rows = dict(found["all"])
    sampled = rows.pop("sampled")
    read, wrote = rows.pop("judge_prompt"), rows.pop("judge_completion")
    del rows["prompt"], rows["again"]
    assert sum(rows.values()) == sampled > rows["trained"] > 0
    assert 0 < read <= 100 * len(model.asked)
    assert found["cost"]["currency"] == "EUR"
    assert 1e6 * found["cost"]["total"] >= wrote > 0
    assert "EUR so far" in " ".join(said("status").split())
