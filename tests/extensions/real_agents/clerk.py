"""An assistant made with OpenAI's Agents SDK, which hands its task over to a clerk with tools."""

import sys
from pathlib import Path

from agents import Agent, Runner, function_tool  # type: ignore[import-not-found]


@function_tool  # type: ignore[untyped-decorator]
def read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


@function_tool  # type: ignore[untyped-decorator]
def write(path: str, text: str) -> str:
    Path(path).write_text(text, encoding="utf-8")
    return "written"


clerk = Agent(name="clerk", model="policy", instructions="Work on files.", tools=[read, write])
porter = Agent(name="porter", model="policy", instructions="Ask the clerk.", handoffs=[clerk])
Runner.run_sync(porter, sys.argv[1])
