"""A user's own data set, judge, environment, agent loop and agent program in a whole run.

The parts are those of my_task.py, the agent program knows only HTTP; processes and the
(tiny) model are real. What was trained must be what was sampled.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState
from consumer.handle.step_log import read_evaluations
from rolloutmq.config.load import load_config
from rolloutmq.extensions.gateway.section import section_of
from rolloutmq.init.command import TINY, Choices, write_project
from tests.cluster import adjacent_ports
from tests.pipeline.site import Site
from tests.programs import python
from tests.warm_process import run_to_end

STEPS = 2
PARTS = ("twice", "hints", "web", "debate")

AGENT = """
import json, os, sys, urllib.request

def ask(messages):
    request = {"model": "any", "messages": messages, "logprobs": True, "max_tokens": 6}
    body = json.dumps(request).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    with urllib.request.urlopen(request) as reply:
        choice = json.load(reply)["choices"][0]
    seen.append([[token["token"], token["logprob"]] for token in choice["logprobs"]["content"]])
    return {"role": "assistant", "content": choice["message"]["content"]}

seen, messages = [], json.load(sys.stdin)["messages"]
number = int(messages[0]["content"].split()[0])
messages += [ask(messages), {"role": "user", "content": "Sure?"}]
ask(messages)
if number % 2:  # another conversation
    ask([{"role": "user", "content": "And now?"}])
port = os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0]
name = port + os.environ["OPENAI_API_KEY"]
with open(os.path.join(sys.argv[1], name), "w") as file:
    json.dump(seen, file)
"""


TASKS = Path(__file__).with_name("own_parts.toml").read_text(encoding="utf-8")


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    """Four tasks: three with the parts of my_task.py, and one whose agent is a program."""
    site = make_site(steps=STEPS)
    shutil.copy(Path(__file__).with_name("my_task.py"), site.folder)
    (site.folder / "agent.py").write_text(AGENT, encoding="utf-8")
    (site.folder / "seen").mkdir()
    program = [sys.executable, str(site.folder / "agent.py"), str(site.folder / "seen")]
    web = f"""
[tasks.web]
agent_loop = "gateway"
agent_loop_options = {{ command = {orjson.dumps(program).decode()} }}
judge = "my_task:score"
dataset = {{ kind = "python", factory = "my_task:problems", options = {{ most = 100 }} }}
"""
    few = "".join(f"[tasks.{name}.sample]\nmax_tokens = 40\n" for name in PARTS)
    text = site.config.read_text(encoding="utf-8")
    text = re.sub(r"\[tasks\.sums\].*(?=\[worker\])", "", text, flags=re.DOTALL)
    text = (
        text.replace("batch_size = 4", "batch_size = 8").replace(
            'device = "cpu"\n', 'device = "cpu"\nadvantages = "turns"\n'
        )
        + '[engine]\nkind = "transformers"\ndevice = "cpu"\n'
    )
    text += '[retention]\npolicy = "last"\nbatches = 10\n' + TASKS + web + few
    text = re.sub(r"(?m)^(judge = .*)$", r"\1\nprompt_repeat_k = 2", text)
    text = text.replace("workers = 1", "workers = 2")
    text += f"[gateway]\nport = {adjacent_ports()}\nports = 2\n"
    site.config.write_text(text, encoding="utf-8")
    return site


@pytest.mark.slow
def test_parts_of_a_stranger_and_an_agent_program_train_together(site: Site) -> None:
    code, output = site.command("run")
    assert code == 0, output + site.words()
    history = site.history()
    assert [step.step for step in history.steps] == list(range(1, STEPS + 1))
    assert not history.trained_twice()
    assert site.audit().clean
    groups = site.trained()
    tokenizer: Any = AutoTokenizer.from_pretrained(site.model)
    by_task = {name: [group for group in groups if group.task == name] for name in PARTS}
    assert {name: len(found) for name, found in by_task.items()} == dict.fromkeys(
        by_task, 2 * STEPS
    )
    for group in by_task["twice"]:
        for state in group.states:
            first, second = state.turns()
            assert tokenizer.decode(state.response_ids[first.stop : second.start]) == " Sure? "
    assert {len(state.turns()) for group in by_task["hints"] for state in group.states} <= {1, 2, 3}
    check_sessions(by_task["web"], site.folder / "seen", tokenizer)
    check_roles(by_task["debate"])
    assert history.steps[-1].metrics.keys() >= {
        f"rewards/mean/debate/{role}" for role in ("pro", "contra", "critic")
    }
    check_ports(site)
    check_logprobs([state for group in groups for state in group.states], site.model)


def check_ports(site: Site) -> None:
    first = section_of(load_config(site.config)).port
    logs = [site.run_dir / "logs" / f"worker-{n}.log" for n in range(2)]
    served = [re.findall(r"at http://127.0.0.1:(\d+)/v1", log.read_text()) for log in logs]
    assert sorted(served) == [[str(first)], [str(first + 1)]]
    asked = {file.name.split("rmq-")[0] for file in (site.folder / "seen").iterdir()}
    assert asked <= {str(first), str(first + 1)}


def check_sessions(groups: list[RolloutGroup], folder: Path, tokenizer: Any) -> None:
    """Train every session as its agent saw it: the same tokens and logprobs, in 1 or 2 rollouts."""
    seen = [orjson.loads(file.read_bytes()) for file in folder.iterdir()]
    for group in groups:
        odd = int(group.states[0].messages[0]["content"].split()[0]) % 2
        sessions: dict[str, list[RolloutState]] = {}
        for state in group.states:
            sessions.setdefault(str(state.session_id), []).append(state)
        assert [len(states) for states in sessions.values()] == [1 + odd] * 2
        for states in sessions.values():
            turns = [(state, turn) for state in states for turn in state.turns()]
            assert [_as_seen(state, turn, tokenizer) for state, turn in turns] in seen


def _as_seen(state: RolloutState, turn: slice, tokenizer: Any) -> list[list[Any]]:
    pairs = zip(state.response_ids[turn].tolist(), state.logprobs[turn].tolist(), strict=True)
    return [[tokenizer.decode([token]), logprob] for token, logprob in pairs]


def check_roles(groups: list[RolloutGroup]) -> None:
    for group in groups:
        assert [state.index for state in group.states] == [0, 0, 0, 1, 1, 1]
        assert group.roles == ["contra", "critic", "pro"] * 2
        assert group.in_training.tolist() == [True, False, True] * 2
        assert np.isfinite(group.scores).all()
        for state in group.states:
            ends = [turn.stop - 1 for turn in state.turns()]
            assert state.token_rewards is not None
            rewards = {"contra": [0.25, 0.5], "critic": [], "pro": [0.5]}[state.role]
            assert state.token_rewards[ends].tolist() == rewards


def check_logprobs(states: list[RolloutState], folder: Path) -> None:
    """Those of the first weights, by a plain forward pass of the tokens that are trained."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    first = [state for state in states if {span.version for span in state.spans} == {0}]
    assert len(first) > 6
    for state in first:
        assert state.prompt_ids is not None
        whole = torch.tensor(
            np.concatenate([state.prompt_ids, state.response_ids])[None].astype(np.int64)
        )
        with torch.no_grad():
            truth = (
                torch.log_softmax(model(whole).logits[0, :-1], -1)
                .gather(1, whole[0, 1:, None])[:, 0]
                .numpy()
            )
        sampled = np.array([n for turn in state.turns() for n in range(turn.start, turn.stop)], int)
        offset = len(state.prompt_ids) - 1
        np.testing.assert_allclose(state.logprobs[sampled], truth[sampled + offset], atol=1e-4)


# -- own loop ------------------------------


def test_a_loop_of_ones_own_calls_the_parts_one_by_one(tmp_path: Path) -> None:
    said = python("-m", "examples.own_loop", tmp_path)
    assert [line.split(",")[0] for line in said.splitlines()] == [
        f"step {n}: 4 groups" for n in (1, 2, 3, 4)
    ]
    assert (tmp_path / "checkpoint.npy").exists()


# -- new project ------------------------------


CHANGES = ("plan.steps=1", "plan.batch_size=2", "tasks.math.sample.max_tokens=4")


@pytest.mark.slow
def test_a_new_project_runs_to_its_end(tmp_path: Path) -> None:
    project = tmp_path / "mine"
    write_project(project, Choices("math", TINY, None, 0))
    flags = [word for change in CHANGES for word in ("--set", change)]
    said = run_to_end(project, "run", "config.toml", *flags)
    assert "lost 0 · in two stages 0 · trained twice 0" in said
    folder = project / "runs" / "mine"
    assert sorted(read_evaluations(folder)) == [("held_out", 0), ("held_out", 1)]
