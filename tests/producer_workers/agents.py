"""Agents for the gateway: each knows the openai package, and nothing of this project."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import time
from typing import Any

import openai

TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
}


async def wander(task: Any) -> float:
    """Act as agents do, by a seed in the question.

    They continue, retry, cut the history, edit it, and ask twice at once.
    """
    client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    dice = random.Random(task.question)
    messages: list[Any] = list(task.messages)
    async with client:
        for _ in range(dice.randint(2, 6)):
            async with asyncio.TaskGroup() as asked:
                asks = [
                    asked.create_task(
                        client.chat.completions.create(
                            model="any", messages=messages, temperature=0.1
                        )
                    )
                    for _ in range(2 if dice.random() < 0.3 else 1)
                ]
            if dice.random() < 0.3:
                await write_on(client, task.question, dice)
            said = dice.choice(asks).result().choices[0].message
            what = dice.random()
            if what < 0.15:
                continue  # the same again
            messages.append(said.model_dump(exclude_none=True))
            if what < 0.3:
                messages[-1]["content"] += "!"  # a sloppy copy
            if what > 0.85:
                messages = messages[:1]  # a new conversation
            messages.append({"role": "user", "content": dice.choice(["and?", "why?"])})
    return dice.random()


async def write_on(client: openai.AsyncOpenAI, text: str, dice: random.Random) -> None:
    """Ask for text behind a text, with some of its own in between; sometimes behind tokens."""
    for _ in range(dice.randint(1, 3)):
        prompt: Any = list(text.encode()) if dice.random() < 0.3 else text
        reply = await client.completions.create(model="any", prompt=prompt, max_tokens=50)
        text += reply.choices[0].text + dice.choice(["", "and", "so"])


async def ask(task: Any, messages: Any, **more: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        reply = await client.chat.completions.create(model="any", messages=messages, **more)
    return reply.choices[0]


async def reason_and_act(task: Any) -> None:
    """Stop where the model begins to invent what it observes."""
    messages: list[Any] = list(task.messages)
    for _ in range(2):
        said = (await ask(task, messages, stop=["\nSeen:"])).message
        assert "Seen" not in str(said.content)
        assert not said.tool_calls, "none were offered"
        messages += [said, {"role": "user", "content": "Seen: 5"}]


async def calculate(task: Any) -> None:
    """Run the calls of the model until it makes none.

    It sends them back with other white space.
    """
    messages: list[Any] = list(task.messages)
    while True:
        choice = await ask(task, messages, tools=[TOOL])
        calls = choice.message.tool_calls
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        if not calls:
            return
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in messages[-1]["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, indent=1)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "5"})


async def raises(task: Any) -> None:
    raise ZeroDivisionError("by the agent")


async def asks_nothing(task: Any) -> None:
    pass


async def never_ends(task: Any) -> None:
    await asyncio.sleep(3600)


async def talks_for_ever(task: Any) -> None:
    messages: list[Any] = list(task.messages)
    while True:
        messages += [(await ask(task, messages)).message, {"role": "user", "content": "go on"}]


HERE = set[str]()
"""The questions of the agents in this process."""


async def harms(task: Any) -> float:
    """Ask once; then do what the question says, to all that share this process and wait for it."""
    HERE.add(task.question)
    if not task.finished:
        await ask(task, task.messages)
    do_harm(task.question)
    while {"blocks", "exits"} & HERE:
        await asyncio.sleep(0.05)
    return 1.0


def harms_threads(task: Any) -> float:
    HERE.add(task.question)
    if not task.finished:
        asyncio.run(ask(task, task.messages))
    do_harm(task.question)
    while {"locks", "exits"} & HERE:
        time.sleep(0.05)
    return 1.0


def do_harm(question: str) -> None:
    if question == "blocks":
        time.sleep(1000)
    elif question == "locks":  # sleeps in C, with the interpreter's lock
        ctypes.PyDLL(None).sleep(1000)
    elif question == "exits":
        os._exit(3)


PROGRAM = """
import json, sys
from openai import OpenAI

task = json.load(sys.stdin)
client = OpenAI()  # base URL and key are in the environment
assert sys.argv[1] == task["messages"][-1]["content"]
messages = task["messages"]
text = ""
for chunk in client.chat.completions.create(model="any", messages=messages, stream=True):
    text += chunk.choices[0].delta.content or ""
messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]
client.chat.completions.create(model="any", messages=messages)
client.chat.completions.create(model="any", messages=[{"role": "user", "content": "another matter"}])
if "fail" in sys.argv[1]:
    sys.exit("cannot go on")
"""
"""A program of three turns in two conversations."""
