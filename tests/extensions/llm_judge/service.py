"""A server of the OpenAI API whose model judges as a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.producer_workers.http_service import http_service


@dataclass
class Judging:
    """`asked`: the bodies of all requests."""

    url: str = ""
    asked: list[Any] = field(default_factory=list)


def completion(text: str) -> bytes:
    usage = {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107}
    return orjson.dumps({"choices": [{"message": {"content": text}}], "usage": usage})


@contextmanager
def judging_model(answer: Callable[[str, int], str]) -> Iterator[Judging]:
    """Answer each question, the text of its last message, with `answer(question, its number)`."""
    service = Judging()

    def serve(path: str, body: Any) -> tuple[int, bytes]:
        assert path == "/v1/chat/completions"
        service.asked.append(body)
        said = body["messages"][-1]["content"]
        return 200, completion(answer(said, len(service.asked)))

    with http_service(serve) as url:
        service.url = f"{url}/v1"
        yield service
