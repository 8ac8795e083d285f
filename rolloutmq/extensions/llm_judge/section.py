"""[tasks.<name>.llm]: the values of a judge that is a language model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from buffer.config.section import Count, Section
from buffer.errors import ConfigError
from producer_workers.config.attached_judge import AttachedJudge
from producer_workers.http_client import is_loopback


class LlmSection(Section, AttachedJudge):
    """[tasks.<name>.llm]: a language model behind the OpenAI API that judges, with judge = "llm".

    Its verdict in words is kept with each rollout (`extra.feedback`), and shown by `rolloutmq show`
    and the browser. Set judging.limit for the quota of the API; with judging.cache, no text is
    judged twice.
    """

    scored_by: ClassVar[str] = "rolloutmq.extensions.llm_judge.judge:LlmJudge"

    url: str = Field(pattern=r"^https?://[^\s?#@]+$")
    """URL of the API, with /v1; a server of yours, such as `vllm serve`, or a hosted one"""
    model: str = Field(min_length=1)
    """name of the model at the API"""
    api_key_env: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """environment variable with the key of the API; default: no key"""
    rubric: str = "Judge whether the response answers the task correctly, completely and clearly."
    """what a good response is, in as many lines as you like"""
    mode: Literal["rubric", "pairwise"] = "rubric"
    """rubric: a score from 0 to 1 for each response. pairwise: the share of wins over responses to
    the same prompt; each pair is asked about in both orders
    """
    opponents: int = Field(3, ge=0, le=1023)
    """mode pairwise: random opponents of each response; 0: all others of its group"""
    points: int = Field(10, ge=1, le=100)
    """mode rubric: the best grade that the model may give, for a score of 1"""
    max_tokens: Count = Field(1024, ge=16)
    """most tokens of a verdict, thoughts included"""
    temperature: float = Field(0.0, ge=0, le=2)
    """of its sampling; 0 is greedy"""
    repeat_share: float = Field(0.05, ge=0, le=1)
    """mode rubric: share of the responses that are judged twice: their score is the mean, and
    `disagreement` in their reward the difference; 0: none
    """
    structured: bool = True
    """ask for an answer by JSON schema (`response_format`); false for APIs that refuse it: the
    prompt alone then demands JSON
    """
    million_prompt_tokens: float = Field(0.0, ge=0, le=1e9)
    """price of a million tokens that the model reads, in the currency of [cost]"""
    million_completion_tokens: float = Field(0.0, ge=0, le=1e9)
    """price of a million tokens that it writes"""
    options: dict[str, Any] = Field(default_factory=dict)
    """further fields of each request, for example reasoning_effort = "low"
    """

    def problems(self) -> Iterator[str]:
        host = urlsplit(self.url).hostname or ""
        if self.api_key_env and self.url.startswith("http:") and not is_loopback(host):
            yield f"a key would be sent to {host} unencrypted: use https://"
        if taken := {"model", "messages", "stream", "n"} & self.options.keys():
            yield f"options cannot set {', '.join(sorted(taken))}"

    def headers(self) -> dict[str, str]:
        """Return the headers with the key. Raises ConfigError where it is not set."""
        if self.api_key_env is None:
            return {}
        if not (key := os.environ.get(self.api_key_env, "").strip()):
            raise ConfigError(
                f"the environment variable {self.api_key_env} is not set",
                hint="it holds the key of [tasks.<name>.llm]; set it where workers are started",
            )
        return {"Authorization": f"Bearer {key}"}

    @classmethod
    def checks(cls, config: Any) -> Mapping[str, Callable[[], str]]:
        sections = {name: task.attached.get("llm") for name, task in config.tasks.items()}
        return {f"llm of {name}": each.check for name, each in sections.items() if each}

    def check(self) -> str:
        self.headers()
        return f"{self.model} at {self.url}"
