"""One finding about a run, as `status`, `doctor`, the browser and the report show it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rich.text import Text

from rolloutmq.output import age

Level = Literal["note", "warning", "error", "stuck", "fault"]

PATIENCE_MS = 30_000  # a shorter pause of the trainer, or wait, is normal

_MARKS = {
    "ok": ("[ok  ]", "green"),
    "warning": ("[warn]", "yellow"),
    "error": ("[BAD ]", "bold red"),
    "note": ("[note]", "dim"),
    "stuck": ("[WAIT]", "yellow"),
    "fault": ("[BAD ]", "bold red"),
}


@dataclass(frozen=True, slots=True)
class Symptom:
    """One finding: what was found, what to do, and for how many ms it lasts (None: unknown).

    `name`: "SUBJECT/KIND", the same in every version, for programs and for `[trainer] silence`.
    `trace`: the traceback of the user's code, if that raised. `look`: what shows it: metrics
    (`rewards/mean`), groups (`math-0000000042`) and commands (`rolloutmq batch 50`).
    """

    level: Level
    name: str
    what: str
    fix: str = ""
    since_ms: int | None = None
    trace: str = ""
    look: tuple[str, ...] = ()

    def text(self) -> Text:
        since = f", for {age(self.since_ms)}" if self.since_ms is not None else ""
        trace = "".join(f"\n       {line}" for line in self.trace.splitlines())
        look = f"\n       look at {', '.join(self.look)}" if self.look else ""
        what = Text.assemble(f"{self.what}{since}", (trace, "red"), (look, "dim"))
        return marked(self.level, what, self.fix)


def marked(level: str, what: str | Text, fix: str = "") -> Text:
    return Text.assemble(_MARKS[level], " ", what, f"\n       {fix}" if fix else "")


fault, stuck, warning, note = (
    partial(Symptom, level) for level in ("fault", "stuck", "warning", "note")
)


def waiting(name: str, what: str, fix: str, since_ms: int | None) -> Symptom:
    """Return a wait, which is normal at first."""
    return (stuck if (since_ms or 0) > PATIENCE_MS else note)(name, what, fix, since_ms)


def worst_first(symptoms: Iterable[Symptom]) -> list[Symptom]:
    """Sort symptoms by level: fault, stuck, error, warning, note."""
    order: tuple[Level, ...] = ("fault", "stuck", "error", "warning", "note")
    return sorted(symptoms, key=lambda symptom: order.index(symptom.level))
