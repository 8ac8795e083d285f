"""Whether a task goes on being produced, as a function of the user's (XTuner's `should_continue_fn`).

    def at_least_half(completed, wanted, *, progress):
        return completed < wanted // 2 and progress.filtered < 10 * wanted

`completed`: groups that are ready; `wanted`: groups that should be, for all steps that the strategy produces for at
this moment; `progress`: the task's counts since the run began (buffer/progress.py). Called in every round of the
producer. Once it says no, nothing more is started for the next train step, and its batch is what there is.
"""

from __future__ import annotations

from collections.abc import Callable

from buffer.dotted_path import load_object
from buffer.errors import ConfigError

ShouldContinue = Callable[..., bool]


def load_should_continue(spec: str | None) -> ShouldContinue | None:
    """The function at "module:function"; None, for which production goes on until the target is reached, for None."""
    if spec is None:
        return None
    function = load_object(spec, kind="should_continue_fn")
    if not callable(function):
        raise ConfigError(f"should_continue_fn {spec!r} is not a function", hint='give "module:function"')
    chosen: ShouldContinue = function
    return chosen
