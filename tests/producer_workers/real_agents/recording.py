"""Keep the requests of an agent, without the prose of its makers, ids, and folders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.producer_workers.real_agents.scripted import HERE, HOME, NOTE, ODD, QUESTION, Agent

RECORDED = HERE / "recorded"

_DROPPED = ("metadata", "client_metadata", "prompt_cache_key")
_SCHEMAS = ("parameters", "input_schema", "schema")
_KEPT = ("arguments", "input")
_LONGEST = 40  # characters of a string that is no prose
_UUID = re.compile(r"[\da-f]{8}-[\da-f]{4}-[\da-f]{4}-[\da-f]{4}-[\da-f]{12}")


class Trimmer:
    """Replaces each text that is not ours by its number and length, and its first tag."""

    def __init__(self, agent: Agent, home: Path) -> None:
        self.home = str(home)
        self.ours = "".join([*agent.turns, QUESTION, NOTE]).replace(ODD, "\ufffd")
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
        return f"{tag[0] if tag else ''}[text {number}: {len(text)} characters]"


def record(agent: Agent, home: Path, requests: list[tuple[str, bytes]]) -> None:
    trimmer = Trimmer(agent, home)
    kept = [{"path": path, "body": trimmer.trim(json.loads(body))} for path, body in requests]
    text = json.dumps(kept, indent=1, ensure_ascii=False) + "\n"
    (RECORDED / f"{agent.name}.json").write_text(text, encoding="utf-8")
