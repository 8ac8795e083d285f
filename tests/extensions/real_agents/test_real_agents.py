"""Test the gateway with agents as users install and start them: `make test-agents`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.extensions.gateway.dialects.dialect import AgentRequest
from tests.extensions.real_agents.recording import record
from tests.extensions.real_agents.scripted import (
    AGENTS,
    BINARIES,
    HOME,
    INSTALLED,
    NOTE,
    PICTURE,
    QUESTION,
    WORD,
    Agent,
    ScriptedModel,
    chat_of,
    check_session,
)
from tests.producer_workers.recorder import loop_of, questions, run

pytestmark = pytest.mark.agents

OWN = ("ANTHROPIC", "CLAUDE", "CODEX", "OPENAI", "OPENCODE", "QWEN", "MSWEA", "XDG")
"""Beginnings of variables with which agents of the user who runs the tests are configured."""

LIMIT_S = 240.0


@pytest.fixture(params=sorted(AGENTS))
def agent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Agent:
    agent = AGENTS[request.param]
    installed = os.pathsep.join(map(str, BINARIES))
    monkeypatch.setenv("PATH", f"{installed}{os.pathsep}{os.environ['PATH']}")
    is_users = agent.program == "claude"
    if shutil.which(agent.program, path=None if is_users else installed) is None:
        assert is_users or not INSTALLED.exists(), f"no {agent.program}"
        pytest.skip(f"no {agent.program}: see `make test-agents`")
    return agent


@pytest.fixture
def home(agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith(OWN)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    files = {"work/note.txt": NOTE, **agent.files}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "work" / "picture.png").write_bytes(PICTURE)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def test_an_agent_is_recorded_token_by_token_and_its_answer_is_judged(
    agent: Agent, home: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[tuple[str, bytes]] = []
    parse: Any = AgentRequest.model_validate_json

    def note(kind: type[AgentRequest], body: bytes) -> Any:
        requests.append((kind.path, body))
        return parse.__func__(kind, body)

    monkeypatch.setattr(AgentRequest, "model_validate_json", classmethod(note))
    chat = chat_of(tokenizer)
    turns = [t.replace(HOME, str(home)) if isinstance(t, str) else t for t in agent.turns]
    model = ScriptedModel(chat, turns)
    loop = loop_of(chat, None, command=agent.command, time_limit_s=LIMIT_S)
    states = run(loop, model, questions(QUESTION, max_tokens=200_000))
    check_session(agent, model, states)
    if agent.writes:
        assert Path("answer.txt").read_text(encoding="utf-8").strip() == WORD
    if "RECORD" in os.environ:
        record(agent, home, requests)
