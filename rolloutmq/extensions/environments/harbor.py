"""Train on tasks of Harbor: each rollout is a trial, whose agent speaks to the gateway.

    dataset = {kind = "harbor", path = "tasks"}: agent_loop is harbor; judge = "environment"
    agent_loop_options = {harbor_python = "harbor/bin/python", trial.agent.name = "terminus-2"}

    rollout ──▶ process of `harbor_trial` ──▶ Trial: environment, agent ──▶ gateway ──▶ tokens
                                                      └──▶ tests ──▶ reward

A worker owns the pipe to each process, which owns its trial and the environment. The process ends
its trial when the pipe closes, so the death of a worker leaves no environment. If the process is
killed, the worker starts another one that stops the environment by the trial's name. If both are
killed at once, the environment stays: its name begins with "rmq-".
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import orjson

from buffer.errors import ConfigError, JudgeError, Skip
from buffer.failure_text import trace_text
from producer_workers.user_code.border import check_numbers
from producer_workers.work_time import timeout
from rolloutmq.extensions.gateway.agents import (
    EVERY_ROLE,
    MODEL,
    AgentError,
    Begin,
    Earned,
    end_process,
)

log = logging.getLogger("rolloutmq.worker")

PROGRAM = Path(__file__).with_name("harbor_trial.py")

CHECK_S = 120.0  # for Harbor to load an agent and an environment

LARGEST_ANSWER = 2**20  # bytes

TASK_PATH = "task_path"
"""Key of `extra`: the folder of the task (`rolloutmq.extensions.environments.rows`)."""

SCORED_ERRORS = frozenset(
    {
        "AgentTimeoutError",
        "ContextLengthExceededError",
        "ContextWindowExceededError",
        "OutputLengthExceededError",
        "OutputTokenExceededError",
    }
)
"""Errors of a trial that the model's work ends in; what the tests then say is its reward."""

# Harbor sends usage data, and LiteLLM asks for prices, unless these are set.
_QUIET = {"HARBOR_TELEMETRY": "off", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


class TrialFailed(AgentError):
    """A trial gave no reward that counts."""

    earned: dict[str, float] | None = None


class HarborAgent:
    """Plays each session as a trial.

    `trial`: keys of Harbor's TrialConfig, with the agent. `reward` is the key of the tests' reward
    that becomes the score. After an error in `scored_errors`, beside those in SCORED_ERRORS, the
    tests' reward counts. An error in `skipped_errors` skips the group, as does a key `skip` of the
    reward that is not 0. `trials_dir` keeps the folders of trials. `time_limit_s` stands still
    while the agent waits for a quota. Harbor's own limits do not: raise
    `trial.agent.override_timeout_sec` under a quota.
    """

    resumable = False

    def __init__(
        self,
        *,
        harbor_python: str,
        trial: Mapping[str, Any],
        reward: str = "reward",
        scored_errors: Collection[str] = (),
        skipped_errors: Collection[str] = (),
        trials_dir: str | None = None,
        trials_at_once: int = 16,
        time_limit_s: float = 7200.0,
        cleanup_s: float = 60.0,
    ) -> None:
        self.processes = TrialProcesses(harbor_python, trials_at_once, time_limit_s, cleanup_s)
        match trial:
            case {"agent": {**agent}}:
                named = {"model_name": f"openai/{MODEL}"}  # behind OPENAI_BASE_URL, for LiteLLM
                self._config = {**trial, "agent": named | agent}
            case _:
                hint = 'set trial.agent = { name = "terminus-2" }'
                raise ConfigError("agent_loop_options.trial has no table agent", hint=hint)
        self._reward = reward
        self._scored = SCORED_ERRORS | set(scored_errors)
        self._skipped = frozenset(skipped_errors)
        self._trials_dir = trials_dir

    def check(self) -> None:
        """Raise ConfigError if Harbor, the agent or the environment cannot be loaded."""
        self.processes.check({**self._config, "task": {"path": "."}})

    async def run(self, begin: Begin) -> Earned:
        """Return the reward of the trial's tests. Raises TrialFailed, Skip."""
        task = begin()
        folder = task.extra.get(TASK_PATH)
        if not isinstance(folder, str) or not Path(folder).is_dir():
            hint = 'dataset = { kind = "harbor", ... } names it, by a path that all machines share'
            raise TrialFailed(f"{TASK_PATH} = {folder!r} is no folder of this machine", hint=hint)
        name = f"rmq-{re.sub('[^a-zA-Z0-9]+', '-', task.session_id)}-{secrets.token_hex(3)}"
        agent = self._config["agent"]
        kept = self._trials_dir and Path(self._trials_dir).absolute()
        config = {
            **self._config,
            "task": {"path": folder},
            "trial_name": name,
            "trials_dir": str(kept or Path(tempfile.gettempdir()) / name),
            "agent": {**agent, "env": {**agent.get("env", {}), **task.variables}},
        }
        request = {"config": config, "keep": bool(kept), "variables": task.variables}
        return {EVERY_ROLE: self._earned(name, await self.processes.run(request))}

    def _earned(self, name: str, answer: Mapping[str, Any]) -> dict[str, float]:
        found = dict(answer["rewards"] or {})
        if found.pop("skip", 0):
            raise Skip("the task's tests say so")
        for error in answer["errors"]:
            if error["type"] in self._skipped:
                raise Skip(_line(error))
        score = found.pop(self._reward, None)
        given = {} if score is None else {**found, "score": score}
        try:
            rewards = check_numbers("the tests", given) or None
        except JudgeError as wrong:
            raise TrialFailed(f"trial {name}: {wrong.message}") from wrong
        for error in answer["errors"]:
            if error["type"] not in self._scored or not rewards:
                trace = trace_text(error["trace"].strip().split("\n"))
                failed = TrialFailed(f"trial {name}: {_line(error)}", trace=trace)
                failed.earned = rewards  # counts if the session's tokens were used up
                raise failed
        if not rewards:
            known = (
                f"the tests' reward has only {', '.join(found)}" if found else "it has no reward"
            )
            hint = f"its tests write {self._reward!r} (agent_loop_options.reward) to reward.json"
            raise TrialFailed(f"trial {name}: {known}", hint=hint)
        return rewards

    def close(self) -> None: ...  # each process ends with its session


def _line(error: Mapping[str, str]) -> str:
    return f"{error['type']}: {' '.join(error['message'].split())}"


class TrialProcesses:
    """The processes of trials, up to `at_once`. One that is ended has `cleanup_s` for that."""

    def __init__(self, python: str, at_once: int, limit_s: float, cleanup_s: float) -> None:
        found = shutil.which(python)
        if found is None:
            raise ConfigError(
                f"harbor_python = {python!r} is no program of this machine",
                hint="python3.12 -m venv harbor && harbor/bin/pip install harbor; then give "
                "harbor/bin/python",
            )
        self._python = python
        self._command = [str(Path(found).absolute()), "-P", str(PROGRAM)]
        self._free = asyncio.Semaphore(at_once)
        self._limit_s = limit_s
        self._cleanup_s = cleanup_s
        self._ending: set[asyncio.Task[None]] = set()

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise ConfigError if Harbor cannot load what a TrialConfig names."""
        request = orjson.dumps({"config": config, "check": True})
        environment = _QUIET | os.environ
        try:
            ran = subprocess.run(
                self._command, input=request, env=environment, capture_output=True, timeout=CHECK_S
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"Harbor was not loaded within {CHECK_S:g} s") from error
        if not ran.stdout:
            last = ran.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise ConfigError(f"{self._python} ended with {ran.returncode}", hint=last)
        for told in orjson.loads(ran.stdout)["errors"]:
            hint = f"{self._python} runs Harbor; see docs/pages/environments.md"
            raise ConfigError(f"agent_loop_options: {_line(told)}", hint=hint)

    async def run(self, request: Mapping[str, Any]) -> Any:
        """Return the answer of a process. Cancelling ends its trial, and does not wait for that.

        Raises TrialFailed.
        """
        async with self._free:
            return await self._run(request, self._limit_s)

    async def ended(self) -> None:
        """Wait until the environments of all ended trials have stopped."""
        while self._ending:
            await asyncio.wait(self._ending)

    async def _run(self, request: Mapping[str, Any], limit_s: float) -> Any:
        with tempfile.TemporaryFile() as stderr:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env=_QUIET | os.environ,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                limit=LARGEST_ANSWER,
                start_new_session=True,
            )
            try:
                async with timeout(limit_s):
                    answer = await _ask(process, {**request, "cleanup_s": self._cleanup_s})
            except TimeoutError as error:
                hint = "see agent_loop_options.time_limit_s"
                message = f"the trial took longer than {limit_s:g} s"
                raise TrialFailed(message, hint=hint) from error
            finally:
                self._end(process, request)
            if answer:
                return json.loads(answer)  # orjson would refuse a reward that is not a number
            await process.wait()
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - 2000))
            last = stderr.read().decode(errors="replace").strip().split("\n")
            message = f"the process of the trial ended with {process.returncode}"
            raise TrialFailed(message, trace=trace_text(last))

    def _end(self, process: Any, request: Mapping[str, Any]) -> None:
        process.stdin.close()
        ending = asyncio.create_task(self._clean(process, request))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _clean(self, process: Any, request: Mapping[str, Any]) -> None:
        """Wait for the end of a process whose pipe is closed; if it was killed, clean up for it."""
        try:
            async with asyncio.timeout(self._cleanup_s + 5):
                await process.wait()
        except TimeoutError:
            log.warning("a trial of Harbor did not end", extra={"pid": process.pid})
        await end_process(process)
        if process.returncode == 0 or request.get("clean"):
            return
        try:
            answer = await self._run({**request, "clean": True}, self._cleanup_s)
            why = "; ".join(map(_line, answer["errors"]))
        except TrialFailed as error:
            why = error.message
        if why:
            name = request["config"]["trial_name"]
            log.error("the environment of trial %s may be left: %s", name, why)


async def _ask(process: Any, request: Mapping[str, Any]) -> bytes:
    """Return the line that a process answers; b"" if it ended without one. Raises TrialFailed."""
    try:
        process.stdin.write(orjson.dumps(request) + b"\n")
        await process.stdin.drain()
    except OSError:  # it has ended
        pass
    try:
        line: bytes = await process.stdout.readline()
    except ValueError as error:
        raise TrialFailed(f"the trial's answer has more than {LARGEST_ANSWER} bytes") from error
    return line
