"""Run one trial of Harbor for a worker, under Harbor's interpreter; it imports nothing of ours.

    stdin   {"config": TrialConfig, "keep": bool, "cleanup_s": 60.0} in one line, then stays open
    stdout  {"rewards": {...} or null, "errors": [{"type", "message", "trace"}], "log", "tests"}

The end of stdin (the worker has died, or wants no result) and SIGTERM end the trial, which then
stops its environment, in `cleanup_s` at most. With `"check": true` it only loads the agent and the
environment. With `"clean": true` it stops the environment of a trial whose process was killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

LONGEST_TEXT = 2000  # characters of a log that are told

LARGEST_REQUEST = 2**26  # bytes

Answer = dict[str, Any]


async def main(answers: int) -> None:
    loop = asyncio.get_running_loop()
    stdin = asyncio.StreamReader(LARGEST_REQUEST)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    request = json.loads(await stdin.readline())
    if request.get("check"):
        answer = await _answer(request)
    else:
        answer = await _until_end(request, stdin)
    os.write(answers, json.dumps(answer).encode() + b"\n")


async def _until_end(request: dict[str, Any], stdin: asyncio.StreamReader) -> Answer:
    """Return the trial's answer, and end it when stdin ends or a signal comes."""
    trial = asyncio.create_task(_answer(request))

    def end() -> None:
        signal.alarm(max(1, int(request["cleanup_s"])))  # it kills: an environment may never stop
        trial.cancel()

    async def wait_for_end() -> None:
        await stdin.read()
        end()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    waiting = asyncio.create_task(wait_for_end())
    try:
        return await trial
    except asyncio.CancelledError:  # nobody wants its result
        return {"rewards": None, "errors": [_error(TimeoutError("the trial was ended"))]}
    finally:
        waiting.cancel()
        if not request["keep"]:
            shutil.rmtree(request["config"]["trials_dir"], ignore_errors=True)


async def _answer(request: dict[str, Any]) -> Answer:
    try:
        config = import_module("harbor.models.trial.config").TrialConfig(**request["config"])
        if request.get("check"):
            return _check(config)
        trial = await import_module("harbor.trial.trial").Trial.create(config)
        if request.get("clean"):
            await trial.agent_environment.stop(delete=True)
            return {"rewards": None, "errors": []}
        result = await trial.run()
    # A task or an option that Harbor refuses, or a fault of Harbor. It exits without an engine.
    except (Exception, SystemExit) as error:
        return {"rewards": None, "errors": [_error(error)]}
    found = [result.exception_info, *(step.exception_info for step in result.step_results or [])]
    folder = Path(config.trials_dir) / config.trial_name
    return {
        "rewards": result.verifier_result and result.verifier_result.rewards,
        "errors": [
            _told(error.exception_type, error.exception_message, error.exception_traceback)
            for error in found
            if error
        ],
        "log": _end_of(folder / "trial.log"),
        "tests": _end_of(folder / "verifier" / "test-stdout.txt"),
    }


def _check(config: Any) -> Answer:
    import_module("harbor.agents.factory").AgentFactory.get_agent_class_from_config(config.agent)
    environment = config.environment
    import_module("harbor.environments.factory").EnvironmentFactory.run_preflight(
        environment.type, environment.import_path
    )
    return {"rewards": None, "errors": []}


def _error(error: BaseException) -> dict[str, str]:
    return _told(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def _told(kind: str, message: str, trace: str) -> dict[str, str]:
    return {"type": kind, "message": message[:LONGEST_TEXT], "trace": trace[-LONGEST_TEXT:]}


def _end_of(file: Path) -> str:
    return file.read_text(errors="replace")[-LONGEST_TEXT:] if file.is_file() else ""


if __name__ == "__main__":
    sys.path.append(str(Path.cwd()))  # as a worker finds the user's modules
    stdout = os.dup(1)
    os.dup2(2, 1)  # agents and environments print
    asyncio.run(main(stdout))
