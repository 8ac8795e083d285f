"""A package `harbor` with no more than `harbor_trial` uses, for tests of our side of a trial.

Its trials do what `[play]` of their task.toml says; their environments are folders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_CONFIG = """
from types import SimpleNamespace


class TrialConfig:
    def __init__(self, *, task, agent, environment, trials_dir="trials", trial_name="check", **more):
        if more:
            raise ValueError(f"unknown: {sorted(more)}")
        self.task, self.agent = task, agent
        self.environment = SimpleNamespace(**{"type": None, "import_path": None, **environment})
        self.trials_dir, self.trial_name = trials_dir, trial_name
"""

_AGENTS = """
class AgentFactory:
    @staticmethod
    def get_agent_class_from_config(agent):
        if agent.get("name") != "talker":
            raise ValueError(f"no agent {agent}")
"""

_ENVIRONMENTS = """
class EnvironmentFactory:
    @staticmethod
    def run_preflight(type, import_path):
        if type != "folders":
            raise SystemExit("no such environment")
"""

_TRIAL = '''
import asyncio, json, os, signal, tomllib, urllib.request
from pathlib import Path
from types import SimpleNamespace


class AgentTimeoutError(Exception): ...


class Environment:
    """A folder that exists while it runs."""

    def __init__(self, name, play):
        self.folder = Path(os.environ["STAND_IN_ENVIRONMENTS"]) / name
        self.play = play

    async def stop(self, delete):
        if self.play.get("never_stops"):
            await asyncio.Event().wait()
        if self.folder.is_dir():
            self.folder.rmdir()


class Trial:
    @classmethod
    async def create(cls, config):
        made = cls()
        task = Path(config.task["path"]) / "task.toml"
        made.config = config
        made.play = tomllib.loads(task.read_text())["play"]
        made.agent_environment = Environment(config.trial_name, made.play)
        return made

    async def run(self):
        folder = Path(self.config.trials_dir) / self.config.trial_name
        folder.mkdir(parents=True)
        (folder / "trial.log").write_text("began\\n")
        print("agents print")
        self.agent_environment.folder.mkdir()
        found = None
        try:
            await self.act()
        except Exception as error:
            found = SimpleNamespace(
                exception_type=type(error).__name__,
                exception_message=str(error),
                exception_traceback="where",
            )
        finally:
            await self.agent_environment.stop(delete=True)
        rewards = self.play.get("rewards")
        verified = None if rewards is None else SimpleNamespace(rewards=rewards)
        return SimpleNamespace(exception_info=found, step_results=None, verifier_result=verified)

    async def act(self):
        messages = []
        for turn in range(self.play.get("turns", 1)):
            messages.append({"role": "user", "content": f"turn {turn}"})
            reply = await asyncio.to_thread(self.ask, messages)
            messages.append(reply["choices"][0]["message"])
        if self.play.get("is_killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.play.get("hangs"):
            await asyncio.Event().wait()
        if self.play.get("raises"):
            raise {"timeout": AgentTimeoutError, "fault": ZeroDivisionError}[self.play["raises"]]("so")

    def ask(self, messages):
        env = self.config.agent["env"]
        assert env["ANTHROPIC_API_KEY"] == env["OPENAI_API_KEY"]
        assert env["ANTHROPIC_BASE_URL"] + "/v1" == env["OPENAI_BASE_URL"]
        body = {"model": self.config.agent["model_name"], "messages": messages}
        request = urllib.request.Request(
            env["OPENAI_BASE_URL"] + "/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": "Bearer " + env["OPENAI_API_KEY"], "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
'''

FILES = {
    "models/trial/config.py": _CONFIG,
    "agents/factory.py": _AGENTS,
    "environments/factory.py": _ENVIRONMENTS,
    "trial/trial.py": _TRIAL,
}


def install(folder: Path) -> None:
    for name, code in FILES.items():
        file = folder / "harbor" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code, encoding="utf-8")


def write_task(folder: Path, play: dict[str, Any]) -> Path:
    """Write a task whose trial does what `play` says."""
    folder.mkdir(parents=True)
    (folder / "instruction.md").write_text("Do it.", encoding="utf-8")
    lines = [f"{key} = {_toml(value)}" for key, value in play.items()]
    (folder / "task.toml").write_text("\n".join(["[play]", *lines]), encoding="utf-8")
    return folder


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(part)}" for key, part in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value)
