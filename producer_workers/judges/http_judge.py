"""Judge with a service behind a URL: POST of one rollout as JSON, a reward as JSON back.

Request: index, response, finish_reason, ground_truth, data_source, messages, tool_calls, reward (of
the environment, so far), extra, response_ids and response_mask (null: the model sampled all of
them). Answer: a number, or an object of numbers with "score", which may also have token columns
(`TOKEN_COLUMNS`), arrays with one number for each of response_ids. See
`http_request` for when it is asked again.
"""

from __future__ import annotations

from buffer.wire.rollout import RolloutState
from producer_workers.config.task import JudgingSection
from producer_workers.judges.judge import rollout_fields
from producer_workers.judges.token_columns import take_columns
from producer_workers.user_code.checked_result import check_answer
from producer_workers.user_code.http_request import Service, check_aiohttp


class HttpJudge:
    """Judges at one URL. `judging` limits the time of an answer and the number of retries."""

    def __init__(self, url: str, judging: JudgingSection) -> None:
        what = f"judge {url}"
        check_aiohttp(what)
        self.name = url
        hint = "check the service, or raise [tasks.<name>.judging] timeout_s"
        self._service = Service(what, url, judging.timeout_s, judging.retries, hint)

    async def judge(self, state: RolloutState) -> dict[str, float]:
        """Return the checked reward. Raises JudgeError after the last try."""
        answer = await self._service.ask(rollout_fields(state))
        return take_columns(self.name, state, check_answer(self.name, answer))
