"""Agents as users install and start them, and a model that answers each from a script."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.wire.rollout import RolloutState
from buffer.wire.sampling import SampleParams
from producer_workers.engines.base import Generation
from tests.producer_workers.recorder import Recorder

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "pages" / "agents.md"
INSTALLED = HERE.parents[2] / "build" / "agents"
BINARIES = (INSTALLED / "node_modules" / ".bin", INSTALLED / "venv" / "bin")

QUESTION = "Read note.txt, write its secret word to answer.txt, then tell me the word."
NOTE = "The word is heron.\n"
WORD = "heron"
FOR_ANOTHER = "SUBTASK: say the word."
"""What the model asks of a sub-agent."""
SUMMARY = "<state_snapshot>The word was read; it must be told.</state_snapshot>"
LONG_FILE = "".join(f"{n:07}\n" for n in range(1500))
"""Fills the context of an agent to which a small one is given."""
PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
HOME = "/home/agent"
"""Stands for the agent's home in its command, in the script, and in recorded requests."""
WORK = f"{HOME}/work"

ODD = "ÿ"
"""In a turn: a token that is no text, which agents send back as others."""
THOUGHT = f"<think>\nI read it {ODD} first.\n</think>\n\n"

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system', 'tool'] %}"
    "{{ raise_exception('no such role: ' + m.role) }}{% endif %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call(name: str, **arguments: Any) -> str:
    called = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{called}\n</tool_call>"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


TASKS = tomllib.loads("".join(_blocks("toml")))["tasks"]
CATALOG, OPENCODE = _blocks("json")
"""The commands and files that docs/pages/agents.md gives to users."""


@dataclass(frozen=True)
class Aside:
    """A turn in another conversation than the task's.

    It is for a request with `to` in its first or last message.
    """

    text: str
    to: str


@dataclass(frozen=True)
class Agent:
    """An agent, what the model says to it, and what becomes of its session.

    `turns` answer its requests in order; asides may come sooner or later. The last turn of the
    task's conversation says the word. `contexts` are the segments that begin after the first, and
    those of other conversations, by reason. `files` are written to its home. Its command is that of
    the page for `page` with `changes`, if it has no own.
    """

    name: str
    program: str
    turns: Sequence[str | Aside]
    contexts: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    own_command: Sequence[str] = ()
    page: str = ""
    changes: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> Sequence[str]:
        task = TASKS.get(self.page or self.name, {})
        command = [*(self.own_command or task["agent_loop_options"]["command"])]
        for old, new in self.changes.items():
            assert any(old in part for part in command)
            command = [part.replace(old, new) for part in command]
        return command

    @property
    def writes(self) -> bool:
        return any(isinstance(turn, str) and "answer.txt" in turn for turn in self.turns)


CODEX_READS = THOUGHT + "I read it." + call("exec_command", cmd="cat note.txt")
PATCH = f"*** Begin Patch\n*** Add File: answer.txt\n+{WORD}\n*** End Patch\n"

AGENTS = {
    agent.name: agent
    for agent in [
        Agent(
            "codex",
            "codex",
            [
                CODEX_READS,
                call("view_image", path=f"{WORK}/picture.png"),
                call("exec_command", cmd=f"printf {WORD} > answer.txt") + call("get_goal"),
                WORD,
            ],
        ),
        Agent(
            "codex_catalog",
            "codex",
            [
                CODEX_READS,
                call("apply_patch", patch="of another form"),
                call("apply_patch", input=PATCH),
                WORD,
            ],
            files={"models.json": CATALOG},
        ),
        Agent(
            "opencode",
            "opencode",
            [
                THOUGHT + call("read", filePath=f"{WORK}/note.txt"),
                call("write", filePath=f"{WORK}/answer.txt", content=WORD),
                WORD,
            ],
            files={".config/opencode/opencode.json": OPENCODE},
        ),
        Agent(
            "qwen",
            "qwen",
            [
                THOUGHT + call("read_file", file_path=f"{WORK}/note.txt"),
                call("write_file", file_path=f"{WORK}/answer.txt", content=WORD),
                WORD,
            ],
        ),
        Agent(
            "mini",
            "mini",
            [
                THOUGHT + call("bash", command="cat note.txt"),
                "I forgot to call.",
                call("bash", command=f"printf {WORD} > answer.txt"),
                call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
            ],
            {"branch": 1},  # it drops a turn without a call, and asks again
        ),
        Agent(
            "agents_sdk",
            "python",
            [
                THOUGHT + call("transfer_to_clerk"),
                THOUGHT + call("read", path="note.txt"),
                call("write", path="answer.txt", text=WORD) + call("read", path="note.txt"),
                WORD,
            ],
            {"system": 1},
            own_command=["python", str(HERE / "clerk.py"), "{question}"],
        ),
        Agent(
            "claude",
            "claude",
            [
                THOUGHT + "I read it." + call("Read", file_path=f"{WORK}/note.txt"),
                call("Read", file_path=f"{WORK}/picture.png"),
                call("Write", file_path=f"{WORK}/answer.txt", content=WORD)
                + call("Bash", command="cat note.txt"),
                WORD,
            ],
        ),
        # what they ask beside their answer: memories, titles, sub-agents, summaries
        Agent(
            "qwen_plain",
            "qwen",
            [WORD, Aside("NOTHING TO SAVE", "managed memory")],
            {"system": 1, "other_system": 1},
            page="qwen",
        ),
        Agent(
            "opencode_title",
            "opencode",
            [Aside("A secret word", "title generator"), WORD],
            {"conversation": 1, "other_system": 1},
            files={".config/opencode/opencode.json": OPENCODE},
            page="opencode",
            changes={"--title task ": ""},
        ),
        Agent(
            "codex_agent",
            "codex",
            [
                call("multi_agent_v1.spawn_agent", message=FOR_ANOTHER),
                Aside("It is heron.", FOR_ANOTHER),
                call("multi_agent_v1.wait_agent", targets=["AGENT"]),
                WORD,
            ],
            {"history": 1, "other_tools": 1},
            page="codex",
        ),
        Agent(
            "opencode_agent",
            "opencode",
            [
                call("task", description="it", prompt=FOR_ANOTHER, subagent_type="general"),
                Aside("It is heron.", FOR_ANOTHER),
                WORD,
            ],
            {"conversation": 1, "other_tools": 1},
            files={".config/opencode/opencode.json": OPENCODE},
            page="opencode",
        ),
        Agent(
            "qwen_agent",
            "qwen",
            [
                call("agent", description="it", prompt=FOR_ANOTHER, subagent_type="Explore"),
                Aside("It is heron.", FOR_ANOTHER),
                WORD,
            ],
            {"system": 1, "other_system": 1},
            page="qwen",
        ),
        Agent(
            "claude_agent",
            "claude",
            [
                call("Agent", description="it", prompt=FOR_ANOTHER, subagent_type="Explore"),
                Aside("It is heron.", FOR_ANOTHER),
                WORD,
            ],
            {"conversation": 1, "other_system": 1},
            page="claude",
        ),
        Agent(
            "codex_summary",
            "codex",
            [call("exec_command", cmd="cat long.txt"), SUMMARY, WORD],
            {"tools": 1, "history": 1},
            files={"work/long.txt": LONG_FILE},
            page="codex",
            changes={"model_context_window=131072": "model_context_window=40000"},
        ),
        Agent(
            "opencode_summary",
            "opencode",
            [
                *[call("bash", command="cat long.txt", description="it")] * 2,
                Aside(SUMMARY, "conversation so far"),
                WORD,
            ],
            {"conversation": 2, "other_system": 1},
            files={
                ".config/opencode/opencode.json": OPENCODE.replace("131072", "50000"),
                "work/long.txt": LONG_FILE,
            },
            page="opencode",
        ),
        Agent(
            "qwen_summary",
            "qwen",
            [
                call("run_shell_command", command="cat long.txt", is_background=False),
                Aside(SUMMARY, "scratchpad"),
                WORD,
            ],
            {"system": 1, "conversation": 1, "other_system": 1},
            files={
                ".qwen/settings.json": json.dumps(
                    {
                        "model": {
                            "name": "policy",
                            "chatCompression": {"contextPercentageThreshold": 0.3},
                            "generationConfig": {"contextWindowSize": 60_000},
                        }
                    }
                ),
                "work/long.txt": LONG_FILE,
            },
            page="qwen",
        ),
        Agent(
            "claude_summary",
            "claude",
            [*[call("Bash", command="cat long.txt", description="it")] * 3, SUMMARY, WORD],
            {"branch": 1, "conversation": 1},
            files={"work/long.txt": LONG_FILE},
            page="claude",
        ),
    ]
}


class ScriptedModel(Recorder):
    """Says the turns of a script."""

    def __init__(self, tokenizer: Any, turns: Sequence[str | Aside]) -> None:
        super().__init__(tokenizer, [])
        self.turns = [*turns]
        self.asides: list[int] = []  # their requests
        self._one_at_a_time = asyncio.Lock()

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        async with self._one_at_a_time:
            text = self.tokenizer.decode(prompt_ids)
            messages = text.split("<|im_start|>")
            line = self._next(messages[1] + messages[-2])
            agent = re.search(r"agent_id\W+([\w-]+)", text)
            self.lines = [*(self.lines or ()), line.replace("AGENT", agent[1] if agent else "")]
            return await super().generate(request_id, prompt_ids, params)

    def _next(self, asked: str) -> str:
        for turn in self.turns:
            if isinstance(turn, str) or turn.to in asked:
                self.turns.remove(turn)
                if isinstance(turn, str):
                    return turn
                self.asides.append(len(self.said))
                return turn.text
        raise AssertionError(f"nothing is left to say to {asked}")

    def tokens_of(self, line: str) -> list[int]:
        before, mark, behind = line.partition(ODD)
        encode = self.tokenizer.encode
        return [*encode(before), *[self.tokenizer.get_vocab()["ÿ"]] * len(mark), *encode(behind)]


def chat_of(tokenizer: Any) -> Any:
    """Return the tokenizer with a template that writes tools and calls, as those of models do."""
    made = copy.deepcopy(tokenizer)
    made.chat_template = TEMPLATE
    return made


def check_session(agent: Agent, model: ScriptedModel, states: list[RolloutState]) -> None:
    """Check each recorded token against those that the model read and said, and the segments."""
    assert [state.error for state in states] == [None] * len(states)
    model.check(states, model.asides)
    assert model.turns == []
    assert states[0].extra.get("new_contexts", {}) == agent.contexts
    new = [count for why, count in agent.contexts.items() if not why.startswith("other")]
    assert len(states) == 1 + sum(new)
    last = agent.turns[-1]
    assert isinstance(last, str) or not agent.writes
    assert states[-1].response.endswith(str(last) if agent.writes else WORD)
