"""Test the judge by a language model with vLLM's server, as a user would start it.

The model is tiny and random, so its verdicts are noise. But they have the form that the server was
asked for, which this model would never write by itself.
"""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from buffer.groups.verdicts import JudgeUse
from buffer.ids import new_nonce
from buffer.redis.store import Store
from buffer.run.run import Run
from producer_workers.build import _make_judge
from producer_workers.config.task import TaskSection
from producer_workers.judges.watched_judges import WatchedJudges
from rolloutmq.extensions.llm_judge.questions import VerdictUnreadable
from tests.buffer.scene import Scene
from tests.extensions.llm_judge.test_llm_judge import judge_of, judged, rollouts, use_of
from tests.producer_workers.engines.tiny_model import make_tokenizer, write_tiny_model
from tests.producer_workers.engines.vllm_server import vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Yield the values of [tasks.<name>.llm] for a server whose model ends its texts soon."""
    model = write_tiny_model(tmp_path_factory.mktemp("judge") / "model", seed=1)
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    quote = make_tokenizer().get_vocab()['"']
    with vllm_server(model, ["--served-model-name", "tiny"]) as url:
        yield {
            "url": f"{url}/v1",
            "model": "tiny",
            "max_tokens": 512,
            "temperature": 1.0,
            "repeat_share": 0.0,
            "options": {"seed": 3, "logit_bias": {str(quote): 6}},
        }


def count(llm: Mapping[str, Any], name: str) -> float:
    """Return a number that the server has counted."""
    with urllib.request.urlopen(llm["url"].replace("/v1", "/metrics")) as answer:
        return sum(map(float, re.findall(rf"(?m)^{name}\S* (\S+)$", answer.read().decode())))


def test_verdicts_have_the_form_that_the_server_enforces(llm: dict[str, Any]) -> None:
    states = rollouts(*map(str, range(8)))
    rewards = [judged(judge_of(**llm, points=7), [state])[0] for state in states]
    assert {round(7 * reward["score"], 6) for reward in rewards} <= {*range(8)}
    assert any(state.extra["feedback"] for state in states)
    pair = rollouts("4", "5")
    rewards = judged(judge_of(**llm, mode="pairwise"), pair)
    assert sum(reward["score"] for reward in rewards) == 1.0
    with pytest.raises(VerdictUnreadable):
        judged(judge_of(**llm, structured=False), rollouts("4"))


@pytest.mark.parametrize("limit", [None, {"at_once": 2, "tokens_per_minute": 10_000_000}])
def test_limit_cache_and_counts_of_a_task_are_those_of_the_server(
    llm: dict[str, Any], limit: dict[str, int] | None
) -> None:
    names = ("request_success", "prompt_tokens", "generation_tokens")
    before = [count(llm, f"vllm:{name}_total") for name in names]

    async def play(run: Run) -> float:
        """Judge the same responses twice; return how many the server read at once, at most."""
        dataset = {"kind": "reasoning_gym", "name": "chain_sum"}
        judging = {"limit": limit, "cache": {}}
        values = {"dataset": dataset, "judge": "llm", "llm": llm, "judging": judging}
        config: Any = SimpleNamespace(tasks={"math": TaskSection.model_validate(values)})
        rewards, most = [], 0.0
        for _ in range(2):
            judge = _make_judge(config, run, "math", WatchedJudges())
            assert judge
            asking = asyncio.ensure_future(judge.judge_group(rollouts(*map(str, range(8)))))
            while not asking.done():
                running = await asyncio.to_thread(count, llm, "vllm:num_requests_running")
                most = max(most, running)
            rewards.append(await asking)
        assert rewards[0] == rewards[1]
        return most

    with closing(Store("memory://")) as store:
        scene = Scene(store, store.client, new_nonce())
        most = asyncio.run(play(scene.run))
        use = use_of(scene)
    assert 0 < most <= 2 if limit else most > 2
    asked, read, written = (
        int(count(llm, f"vllm:{name}_total") - known)
        for name, known in zip(names, before, strict=True)
    )
    assert use == JudgeUse(asked, 8, read, written)
