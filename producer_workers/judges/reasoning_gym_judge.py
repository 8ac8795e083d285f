"""Scores with reasoning-gym's own verifiers.

The verifier gets the whole answer, without what only ends a turn: it is not searched for an answer first.
Many verifiers give part of the score to an answer that contains the right one; "solved" is a score of 1.0.
A few run `eval` on the answer, on what a model wrote: those are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import orjson

from buffer.errors import ConfigError
from buffer.rollout import RolloutState
from producer_workers.judges.answer_text import answer_text

SOURCE_PREFIX = "reasoning_gym/"

# Their verifiers hand the answer to eval, or to sympy's parse_expr, which evals. A test keeps the list whole.
UNSAFE_TASKS = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)


def task_datasets() -> dict[str, tuple[Any, Any]]:
    """All tasks of reasoning-gym: name to (data set class, configuration class)."""
    # The whole package, not its factory: tasks register while it is imported, and judges run in several threads.
    # Only this form waits for an import that another thread has begun.
    import reasoning_gym

    return dict(reasoning_gym.factory.DATASETS)


def check_safe(name: str) -> None:
    """Raises ConfigError for a task whose verifier runs what a model wrote."""
    if name in UNSAFE_TASKS:
        raise ConfigError(
            f"reasoning-gym task {name!r} is refused: its verifier runs eval() on what the model wrote",
            hint="take another task, or judge it in a sandbox of your own",
        )


def reasoning_gym_score(*, response: str, ground_truth: Any, state: RolloutState) -> float:
    """The verifier's score, 0.0 to 1.0, for a rollout that `write_problems` made the problem of."""
    source = state.data_source or ""
    if not source.startswith(SOURCE_PREFIX):
        raise ValueError(f"data_source is {source!r}, not {SOURCE_PREFIX}<task>")
    question = next((m["content"] for m in reversed(state.messages) if m.get("role") == "user"), "")
    name = source.removeprefix(SOURCE_PREFIX)
    return score_entry(name, answer_text(response), question, ground_truth, state.extra)


def score_entry(name: str, answer: str, question: str, truth: Any, extra: Mapping[str, Any]) -> float:
    """Score `answer` to the problem made of `question`, `truth` and `extra` (its metadata and config)."""
    config = orjson.dumps(extra.get("config", {}), option=orjson.OPT_SORT_KEYS)
    entry = {"question": question, "answer": truth, "metadata": extra.get("metadata", {})}
    verifier = _verifier(name, config)
    try:
        return float(verifier.score_answer(answer, entry))
    except Exception:
        # Some verifiers raise on text they cannot parse, and models write any text. Where the right answer
        # can be scored, the text was at fault and is wrong; where not, this raises: the problem is broken.
        verifier.score_answer(truth if truth is not None else "", entry)
        return 0.0


@lru_cache(maxsize=256)
def _verifier(name: str, config: bytes) -> Any:
    """The task's data set: some verifiers read its config. Built once for each source."""
    check_safe(name)
    dataset_class, config_class = task_datasets()[name]
    return dataset_class(config=config_class(**orjson.loads(config)))
