"""Run one trial of Harbor for a worker, under Harbor's interpreter; it imports nothing of ours.

    stdin   {"config": TrialConfig, "variables": {...} for its agent, "keep": whether its
            trials_dir stays, "cleanup_s": 60.0} in one line, then stays open
    stdout  {"rewards": {...} or null, "errors": [{"type", "message", "trace"}]}

The end of stdin (the worker has died, or has ended the trial) and SIGTERM end the trial, which then
stops its environment, in `cleanup_s` at most; the exit code is 1 if it did not stop. With
`"check": true` it only loads the agent and the environment. With `"clean": true` it stops the
environment of a trial whose process was killed.
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

LONGEST_TEXT = 2000  # characters of an error that are told

LARGEST_REQUEST = 2**26  # bytes

Answer = dict[str, Any]


async def main(answers: int) -> None:
    loop = asyncio.get_running_loop()
    stdin = asyncio.StreamReader(LARGEST_REQUEST)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    request = json.loads(await stdin.readline())
    os.environ.update(request.get("variables", {}))
    if request.get("check"):
        answer = await _answer(request)
    else:
        answer = await _until_end(request, stdin)
    os.write(answers, json.dumps(answer).encode() + b"\n")
    if _STOPPING:
        os._exit(1)  # the end of the event loop would wait for the environment


async def _until_end(request: dict[str, Any], stdin: asyncio.StreamReader) -> Answer:
    """Return the trial's answer, and end it when stdin ends or a signal comes."""
    folder = Path(request["config"]["trials_dir"])
    if not request["keep"]:
        folder.mkdir(mode=0o700, exist_ok=True)
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
    except asyncio.CancelledError:  # by `end`
        return {"rewards": None, "errors": [_error(TimeoutError("the trial was ended"))]}
    finally:
        waiting.cancel()
        if not request["keep"]:
            shutil.rmtree(folder, ignore_errors=True)


async def _answer(request: dict[str, Any]) -> Answer:
    try:
        config = import_module("harbor.models.trial.config").TrialConfig(**request["config"])
        if request.get("check"):
            return _check(config)
        trial = await import_module("harbor.trial.trial").Trial.create(config)
        if request.get("clean"):
            await trial.agent_environment.stop(delete=True)
            return {"rewards": None, "errors": []}
        _limit_stop(trial.agent_environment, request["cleanup_s"])
        result = await trial.run()
    # A task or an option that Harbor refuses, or a fault of Harbor. It exits without an engine.
    except (Exception, SystemExit) as error:
        return {"rewards": None, "errors": [_error(error)]}
    found = [result.exception_info, *(step.exception_info for step in result.step_results or [])]
    return {
        "rewards": result.verifier_result and result.verifier_result.rewards,
        "errors": [
            _told(error.exception_type, error.exception_message, error.exception_traceback)
            for error in found
            if error
        ],
    }


_STOPPING: list[asyncio.Future[Any]] = []
"""Of environments that have not stopped in time."""


def _limit_stop(environment: Any, limit_s: float) -> None:
    """Have the trial go on to its reward where its environment does not stop."""
    stop = environment.stop

    async def limited(*given: Any, **named: Any) -> None:
        stopping = asyncio.ensure_future(stop(*given, **named))
        done, _ = await asyncio.wait({stopping}, timeout=limit_s)
        if done:
            stopping.result()
        else:
            _STOPPING.append(stopping)

    environment.stop = limited


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


if __name__ == "__main__":
    sys.path.append(str(Path.cwd()))  # as a worker finds the user's modules
    stdout = os.dup(1)
    os.dup2(2, 1)  # agents and environments print
    asyncio.run(main(stdout))
