"""The judge that asks a language model for a grade, or which of two responses is better."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from random import Random
from statistics import mean
from typing import Any

import orjson

from buffer.errors import JudgeError
from buffer.groups.verdicts import JudgeUse
from buffer.wire.group import FEEDBACK
from buffer.wire.rollout import RolloutState
from producer_workers.config.task import JudgingSection
from producer_workers.judges.cached import digest_of
from producer_workers.judges.load import HttpJudge
from rolloutmq.extensions.llm_judge.questions import JSON_AGAIN, Question, Verdict, question
from rolloutmq.extensions.llm_judge.section import LlmSection

BYTES_PER_TOKEN = 3  # of a prompt, to reserve its tokens; what an answer counts is settled later


class LlmJudge(HttpJudge):
    """Judges by one model; pairwise, it gets whole groups. Raises ConfigError."""

    counts_use = True

    def __init__(self, section: LlmSection, judging: JudgingSection) -> None:
        url = f"{section.url.rstrip('/')}/chat/completions"
        what = f"judge llm ({section.model})"
        super().__init__(url, judging, what=what, headers=section.headers())
        self.name = "llm"
        self.sees_group = section.mode == "pairwise"
        self._section = section

    async def ask(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        if self.sees_group:
            return await self._compare(states)
        (state,) = states
        asked = question(self._section.rubric, self._section.points, state)
        share = int(digest_of(asked.messages)[:8], 16) / 16**8
        times = 2 if share < self._section.repeat_share else 1
        verdicts = await asyncio.gather(*(self._verdict(asked, n) for n in range(times)))
        state.extra[FEEDBACK] = verdicts[0].reason
        values = [verdict.value for verdict in verdicts]
        spread = {"disagreement": max(values) - min(values)} if times > 1 else {}
        return [{"score": mean(values), **spread}]

    async def _compare(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        """Return the share of wins of each response, and how often the order decided."""
        everybody = range(len(states))
        chance = Random(digest_of([state.response for state in states]))
        most = min(self._section.opponents or len(states), len(states) - 1)
        pairs = {
            (min(one, other), max(one, other))
            for one in everybody
            for other in chance.sample([n for n in everybody if n != one], most)
        }
        orders = [order for a, b in sorted(pairs) for order in ((a, b), (b, a))]
        asked = [question(self._section.rubric, 0, states[a], states[b]) for a, b in orders]
        found = await asyncio.gather(*(self._verdict(each) for each in asked))
        wins, swaps = defaultdict(list), defaultdict(list)
        for (a, b), there, back in zip(orders[::2], found[::2], found[1::2], strict=True):
            value = (there.value + 1 - back.value) / 2
            wins[a].append(value)
            wins[b].append(1 - value)
            for one in (a, b):
                swaps[one].append(abs(there.value - 1 + back.value))
        for n, state in enumerate(states):
            state.extra[FEEDBACK] = "\n".join(
                f"#{state.index} (A), #{states[b].index} (B): {verdict.reason}"
                for (a, b), verdict in zip(orders, found, strict=True)
                if a == n
            )
        return [
            {"score": mean(wins[n] or [0.5]), "disagreement": mean(swaps[n] or [0.0])}
            for n in everybody
        ]

    async def _verdict(self, asked: Question, number: int = 0) -> Verdict:
        """Return the verdict on a question; `number` tells its repetitions apart."""
        section = self._section
        body: dict[str, Any] = {
            "model": section.model,
            "messages": asked.messages,
            "max_tokens": section.max_tokens,
            "temperature": section.temperature,
            **section.options,
        }
        if section.structured:
            form = {"name": "verdict", "strict": True, "schema": asked.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        digest = digest_of(section.url, body, number)
        known = await asyncio.to_thread(self.verdicts.find, digest) if self.verdicts else None
        if known is not None:
            return Verdict(*orjson.loads(known))
        verdict = None
        try:
            said = await self._say(body)
            try:
                verdict = asked.read(said)
            except JudgeError:
                again = [("assistant", said), ("user", JSON_AGAIN)]
                more = [{"role": role, "content": text} for role, text in again]
                said = await self._say({**body, "messages": [*asked.messages, *more]})
                verdict = asked.read(said)
            return verdict
        finally:  # an answer without a verdict has used tokens, too
            if self.verdicts:
                kept = orjson.dumps([*verdict]) if verdict else b""
                await asyncio.to_thread(self.verdicts.note, digest, kept)

    async def _say(self, body: dict[str, Any]) -> str:
        """Return what the model answers, and count its tokens. Raises JudgeError."""
        prompt = sum(len(message["content"].encode()) for message in body["messages"])
        most = prompt // BYTES_PER_TOKEN + int(body["max_tokens"])
        use = self.verdicts.use if self.verdicts else JudgeUse()
        use.calls += 1
        answer = await self._service.ask(body, most)
        try:
            counts = answer.get("usage") or {}
            use.prompt_tokens += int(counts.get("prompt_tokens", 0))
            use.completion_tokens += int(counts.get("completion_tokens", 0))
            return str(answer["choices"][0]["message"]["content"] or "")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            what = f"{self._service.what} answered something else: {answer!r:.200}"
            raise JudgeError(what) from error
