"""Run a program by a service with SandboxFusion's form of HTTP: POST of code to URL/run_code.

Request: code, language, stdin, run_timeout (seconds), memory_limit_MB. Answer: status (Success,
Failed, or SandboxError for a fault of the service) and run_result with status (Finished, Error or
TimeLimitExceeded), return_code, stdout and stderr.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ValidationError

from buffer.errors import AnswerTooLong, JudgeError
from producer_workers.user_code.http_request import LONGEST_ANSWER, Service
from producer_workers.user_code.program import Limits, Outcome

RETRIES = 3
"""Further attempts where a service does not answer."""

WAIT_S = 30.0
"""Time that a service has beside that of the program: for its queue."""


class _Result(BaseModel):
    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class _Answer(BaseModel):
    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    run_result: _Result | None = None


async def run_at(url: str, program: str, stdin: str, limits: Limits) -> Outcome:
    """Return how a program ended. Raises JudgeError where the service fails."""
    what = f"sandbox {url}"
    hint = "check the service"
    service = Service(what, _address(url), limits.time_s + WAIT_S, RETRIES, hint)
    question = {
        "code": program,
        "language": "python",
        "stdin": stdin,
        "run_timeout": limits.time_s,
        "memory_limit_MB": limits.memory_mb,
    }
    try:
        given = await service.ask(question)
    except AnswerTooLong:  # only what the program printed makes an answer that long
        return Outcome(None, "", "", f"it wrote more than {LONGEST_ANSWER >> 20} MiB")
    try:
        answer = _Answer.model_validate(given)
    except ValidationError as error:
        raise JudgeError(f"{what} answered {given!r:.200}", hint="see external_sandbox") from error
    result = answer.run_result
    if result is None or answer.status == "SandboxError" or result.status == "Error":
        raise JudgeError(f"{what} failed: {answer.message[:200] or answer.status}", hint=hint)
    if result.status == "TimeLimitExceeded":
        return Outcome(None, result.stdout or "", result.stderr or "", "the time limit was reached")
    return Outcome(result.return_code or 0, result.stdout or "", result.stderr or "")


def _address(url: str) -> str:
    return url.rstrip("/").removesuffix("/run_code") + "/run_code"
