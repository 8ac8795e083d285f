"""Keep the requests of an agent, without the prose of its makers, ids, and folders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.extensions.real_agents.scripted import (
    FOR_ANOTHER,
    HERE,
    HOME,
    NOTE,
    ODD,
    QUESTION,
    Agent,
    Aside,
)

RECORDED = HERE / "recorded"

_DROPPED = ("metadata", "client_metadata", "prompt_cache_key")
_SCHEMAS = ("parameters", "input_schema", "schema")
_KEPT = ("arguments", "input")
_LONGEST = 48  # characters of a string that is no prose
_UUID = re.compile(r"[\da-f]{8}-[\da-f]{4}-[\da-f]{4}-[\da-f]{4}-[\da-f]{12}")


class Trimmer:
    """Replaces each text that is not ours by its number and length, with what tests look for."""

    def __init__(self, agent: Agent, home: Path) -> None:
        self.home = str(home)
        asides = [turn.to for turn in agent.turns if isinstance(turn, Aside)]
        self.sought = [*asides, QUESTION]
        turns = [turn if isinstance(turn, str) else turn.text for turn in agent.turns]
        self.ours = "".join([*turns, QUESTION, FOR_ANOTHER, NOTE]).replace(ODD, "\ufffd")
        self.numbers: dict[str, int] = {}

    def trim(self, value: Any, key: str = "") -> Any:
        match value:
            case {"properties": properties} if key in _SCHEMAS:
                return {"type": "object", "properties": {name: {} for name in properties}}
            case dict():
                kept = {name: each for name, each in value.items() if name not in _DROPPED}
                return {name: self.trim(each, name) for name, each in kept.items()}
            case list():
                return [self.trim(each, key) for each in value]
            case str():
                return self.trim_text(value.replace(self.home, HOME), key)
        return value

    def trim_text(self, text: str, key: str) -> str:
        text = _UUID.sub("id", text)
        is_ours = text in self.ours or key in _KEPT or NOTE.strip() in text[:400]
        if is_ours or len(text) <= _LONGEST or text.startswith("x-anthropic"):
            return text
        number = self.numbers.setdefault(text, len(self.numbers))
        tag = re.match(r"\s*<[\w -]+>", text)
        kept = [tag[0] if tag else "", *(part for part in self.sought if part in text)]
        return f"{''.join(kept)}[text {number}: {len(text)} characters]"


def record(agent: Agent, home: Path, requests: list[tuple[str, bytes]]) -> None:
    """Write requests; tools that were offered before are the number of the request that did."""
    trimmer = Trimmer(agent, home)
    kept: list[dict[str, Any]] = []
    for path, body in requests:
        trimmed = trimmer.trim(json.loads(body))
        offered = [request["body"].get("tools") for request in kept]
        if trimmed.get("tools") in offered and trimmed.get("tools"):
            trimmed["tools"] = offered.index(trimmed["tools"])
        kept.append({"path": path, "body": trimmed})
    text = json.dumps(kept, indent=1, ensure_ascii=False) + "\n"
    (RECORDED / f"{agent.name}.json").write_text(text, encoding="utf-8")


def recorded(name: str) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = json.loads(
        (RECORDED / f"{name}.json").read_text(encoding="utf-8")
    )
    for request in requests:
        if isinstance(number := request["body"].get("tools"), int):
            request["body"]["tools"] = requests[number]["body"]["tools"]
    return requests
