"""User code that raises, each at a line of its own."""

from __future__ import annotations

from typing import Any

from buffer.errors import JudgeError


def score(*, response: str, **_: Any) -> float:
    try:
        return number_in(response)
    except IndexError as error:
        raise ValueError("no number\x1b[31m\u202e") from error  # wrapped


def number_in(response: str) -> float:
    return float(response.split("=")[1])  # inner


def fail(*, response: str, **_: Any) -> float:
    raise KeyError(response)  # plain


def own(**_: Any) -> float:
    raise JudgeError("not today")  # own


def endless(**_: Any) -> float:
    return endless()  # deep


def shouts(*, response: str, **_: Any) -> float:
    raise RuntimeError("x" * 10**6)  # long


async def later(*, response: str, **_: Any) -> float:
    return number_in(response)


def odd_one(*, response: str, ground_truth: str, **_: Any) -> float:
    return fail(response=response) if ground_truth.endswith("0") else 1.0
