"""How a run that exists takes over an edited config: what changes, from when on, what is refused.

    process     compares                     records
    launcher,   settings and origin          the settings, at once; new tasks; not the group sizes,
    trainer                                  which an older producer may still draw with
    producer    its origin                   its group sizes, once it is the active producer
    worker      its origin                   nothing

Each record is made by one script that refuses if another process changed it since it was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from buffer.control.live_settings import differences
from buffer.errors import ConfigError, RunNotFound
from buffer.model.ids import new_nonce
from buffer.model.limits import RunLimits
from buffer.model.origin import FIELD, Origin
from buffer.store.keys import Keys
from buffer.store.replies import unfenced, unknown_reply
from buffer.store.store import Store


@dataclass(frozen=True, slots=True)
class Continuation:
    """The settings of a run that is created or continued.

    `version`: of the settings that they are based on; "" for a new run. `changes`: a sentence for
    each value that differs.
    """

    limits: RunLimits
    origin: Origin | None
    version: str = ""
    changes: list[str] = field(default_factory=list)

    def to_meta(self) -> list[str]:
        """Return field, value, field, value, … for the meta hash."""
        record = [] if self.origin is None else [FIELD, self.origin.model_dump_json()]
        return self.limits.to_meta() + record


def continue_run(
    name: str, meta: Mapping[str, str], limits: RunLimits, origin: Origin | None, step: int
) -> Continuation:
    """Return the settings of a run that takes over `limits` and `origin`, from train step `step`.

    `meta`: of the run. Raises ConfigError for what would break a guarantee.
    """
    before = RunLimits.from_meta(meta)
    after = limits.keeping_tasks_of(before)
    known = Origin.from_meta(meta)
    refused = [*_limit_contradictions(before, after)]
    changes = [f"{change}, from step {step} on" for change in _changes(before, after)]
    if origin and known:
        refused += known.contradictions(origin)
        changes += [
            f"{change}, once a producer starts with it" for change in _resized(known, origin)
        ]
        origin = known.adopting(origin, draws=False)
    _refuse(name, refused)
    return Continuation(after, origin or known, meta.get("limits_version", "0"), changes)


def check_origin(store: Store, keys: Keys, origin: Origin) -> None:
    """Raise ConfigError if the run does not draw from what a process with `origin` would use."""
    known = read_origin(store, keys)
    _refuse(keys.run, [*known.contradictions(origin)] if known else [])


def read_origin(store: Store, keys: Keys) -> Origin | None:
    """Return what the run draws from; None where it has no record of that."""
    return Origin.from_meta(_read(store, keys.meta))


def record_origin(store: Store, keys: Keys, origin: Origin, producer: str) -> list[str]:
    """Record what the active producer, with this nonce, draws from; return what changed.

    Raises ConfigError as `check_origin` does, Fenced, RunNotFound.
    """
    operation = new_nonce()
    while True:
        meta = _read(store, keys.meta)
        known = Origin.from_meta(meta)
        _refuse(keys.run, [*known.contradictions(origin)] if known else [])
        updated = known.adopting(origin, draws=True) if known else origin
        if updated == known:
            return []
        reply: Any = store.call(
            "set_limits",
            keys.slots(),
            {
                "operation": operation,
                "version": int(meta.get("limits_version", 0)),
                "producer": producer,
            },
            tail_args=[FIELD, updated.model_dump_json()],
            durable=True,
        )
        match unfenced(reply, "producer"):
            case ["OK", _]:
                return _resized_from(store, keys, known, origin)
            case ["CONFLICT", _]:
                continue
            case ["NO_RUN"]:
                raise RunNotFound(f"there is no run {keys.run!r} any more")
            case other:
                raise unknown_reply("set_limits", other)


def _resized_from(store: Store, keys: Keys, known: Origin | None, origin: Origin) -> list[str]:
    """Return the group sizes that differ, each with the first draw that may have the new one."""
    changes = []
    for change in _resized(known, origin) if known else ():
        task = change.split(".")[1]
        draw = _read(store, keys.progress(task)).get("cursor", "0")
        changes.append(f"{change}, from draw {draw} on")
    return changes


def _read(store: Store, key: str) -> dict[str, str]:
    raw: Any = store.retrying("config", lambda: store.control.hgetall(key))
    return {name.decode(): value.decode() for name, value in raw.items()}


def _refuse(name: str, reasons: list[str]) -> None:
    if reasons:
        raise ConfigError(
            "\n  ".join([f"this config cannot continue run {name!r}:", *reasons]),
            hint="undo these edits; or start a new run with another [run] name, which may begin "
            "with the weights of this one ([policy] model = a checkpoint's model folder)",
        )


def _limit_contradictions(before: RunLimits, after: RunLimits) -> Iterator[str]:
    tasks = [task for task in before.tasks if not after.tasks[task].is_gone]
    if any(before.token_lag(task) != after.token_lag(task) for task in tasks):
        yield (
            "the difference of [policy] max_staleness and max_token_staleness is another one: the "
            "pools are ordered by it"
        )
    if before.media and before.media != after.media:
        now = after.media or "left out"
        yield f"[run] media is {now}, but groups refer to files in {before.media}"


def _changes(before: RunLimits, after: RunLimits) -> Iterator[str]:
    for name, (old, new) in differences(before, after).items():
        if name == "reweighted":
            yield "the task weights are those of the config again"
        elif name != "tasks":
            yield f"{name}: {old} → {new}"
    for name, task in after.tasks.items():
        was = before.tasks.get(name)
        if was is None or (was.is_gone and not task.is_gone):
            yield f"task {name} is {'new' if was is None else 'back'}"
        elif task.is_gone and not was.is_gone:
            yield (
                f"task {name} is gone (its groups are kept until it is back; `rolloutmq drop "
                f"--task {name} --yes` drops them)"
            )
        elif not task.is_gone:
            old, new = was.model_dump(), task.model_dump()
            names = dict.fromkeys([*old, *new])
            for key in names:
                if old.get(key) != new.get(key):
                    yield f"tasks.{name}.{key}: {_word(old.get(key))} → {_word(new.get(key))}"


def _word(value: object) -> str:
    return "the run's" if value is None else str(value)


def _resized(known: Origin, origin: Origin) -> list[str]:
    return [
        f"tasks.{task}.prompt_repeat_k: {old} → {new}"
        for task, (old, new) in known.resized(origin).items()
    ]
