"""Run as a program: coverage-guided fuzz of the decoder (`make fuzz`). Bytes are mutated as bytes
and as msgpack.

argv: those of libFuzzer (https://llvm.org/docs/LibFuzzer.html), the folder of the corpus last; it
is filled with the golden files first. What breaks the promise is written to a file crash-…, which
decodes the same way in a test.
"""

from __future__ import annotations

import random
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import atheris
import msgpack

with atheris.instrument_imports(include=["buffer"]):
    from proofs.fuzz.promise import GOLDEN, keep


ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**53, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf")),
    *("", "x", "completed", "init", "<i4", "x" * 300, b"", bytes(3), b"\xff" * 8),
    *([], {}, [[]], {"x": {}}, [0, 1, 0, "l0"]),
)

NAMES = ("score", "shape", "mask", "values", "seed", "arguments", "x")


def try_one(data: bytes) -> None:
    keep(data)


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Half of the time bytes, as libFuzzer does; else the document, so that what is behind the
    unpacking is reached.
    """
    dice = random.Random(seed)
    try:
        document = (
            msgpack.unpackb(data, raw=False, strict_map_key=True) if dice.random() < 0.5 else None
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        document = None
    if document is None:
        return bytes(atheris.Mutate(data, max_size))
    for _ in range(dice.randint(1, 3)):
        _change(document, dice)
    try:
        return bytes(msgpack.packb(document))[:max_size]
    except (ValueError, OverflowError):
        return data


def _change(container: Any, dice: random.Random) -> None:
    """Replace, remove, double or add one thing somewhere below."""
    while isinstance(container, dict | list) and container:
        place = dice.choice(
            list(container) if isinstance(container, dict) else range(len(container))
        )
        child = container[place]
        if isinstance(child, dict | list) and child and dice.random() < 0.8:
            container = child
            continue
        match dice.randrange(4):
            case 0:
                container[place] = deepcopy(dice.choice(ODD))
            case 1:
                del container[place]
            case 2 if isinstance(container, list):
                container.append(deepcopy(child))
            case 3 if isinstance(container, dict):
                container[dice.choice(("score", "shape", "mask", "values", "x", place))] = deepcopy(
                    dice.choice((*ODD, child))
                )
            case _ if isinstance(child, bytes) and child:
                container[place] = bytes(atheris.Mutate(child, len(child) + 8))
            case _:
                container[place] = deepcopy(dice.choice(ODD))
        return


def main(arguments: list[str]) -> None:
    corpus = Path(arguments[-1])
    corpus.mkdir(parents=True, exist_ok=True)
    for file in GOLDEN.glob("*.msgpack"):
        (corpus / file.name).write_bytes(file.read_bytes())
    atheris.Setup([sys.argv[0], *arguments], try_one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
