"""How an existing run takes over an edited config: what changes, from when on, what is refused.

    process     compares                     records
    launcher,   settings and origin          the settings, at once; new tasks; not the group sizes,
    trainer                                  which an older producer may still draw with
    producer    its origin                   its group sizes, once it is the active producer
    worker      its origin                   nothing

A setting keeps the value of `rolloutmq set`, unless the config has another one than at the last
start by hand. A trainer that a launcher restarted takes over no settings: the file may be half
edited. The script that makes a record refuses if another process changed it since it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from buffer.errors import ConfigError, RunDamaged
from buffer.ids import new_nonce
from buffer.limits import RunLimits
from buffer.redis.key_fields import require_fields
from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.run.origin import FIELD, Origin
from buffer.run.record import limits_in, read_hash, require_schema, write_meta
from buffer.run.settings import FIELD as RECORD
from buffer.run.settings import (
    TASK,
    THRESHOLDS,
    LiveSettings,
    SettingsRecord,
    reweighting,
    setting_values,
    task_of,
)


@dataclass(frozen=True, slots=True)
class Start:
    """How a process starts a run that it creates or continues.

    `by_hand`: a person did, so take over an edited config. `written`: see SettingsRecord.
    `remembered`: returns what the run's folder knows of the settings, for a server that lost the
    run. `is_done`: returns whether a run of this many steps is complete; it then stays finished.
    """

    by_hand: bool = True
    written: Mapping[str, str] = field(default_factory=dict)
    remembered: Callable[[], SettingsRecord | None] = lambda: None
    is_done: Callable[[int], bool] = lambda steps: False


BY_HAND = Start()  # for a process without a config


@dataclass(frozen=True, slots=True)
class Continuation:
    """The settings of a run that is created or continued.

    `version`: of the settings they are based on; "" for a new run. `changes`: sentences.
    """

    limits: RunLimits
    origin: Origin | None
    record: SettingsRecord
    version: str = ""
    changes: list[str] = field(default_factory=list)

    def to_meta(self) -> list[str]:
        """Return field, value, field, value, … for the meta hash."""
        origin = [] if self.origin is None else [FIELD, self.origin.model_dump_json()]
        return [*self.limits.to_meta(), *origin, RECORD, self.record.model_dump_json()]


def settings_for(
    store: Store,
    keys: Keys,
    nonce: str,
    limits: RunLimits,
    origin: Origin | None,
    start: Start,
    remade_at: int | None,
) -> Continuation:
    """Return what `Run.create` writes: the settings of a new run, or those that continue it.

    `remade_at`: the train step from which a run is made again, even if its `meta` is damaged.
    """
    try:
        meta = read_hash(store, "create run", keys.meta)
        if meta.get("nonce") == nonce:
            if remade_at is None:
                require_schema(keys.run, meta)
            limits_in(keys.meta, meta)
    except RunDamaged:
        if remade_at is None:
            raise
        meta = {}
    if meta.get("nonce") != nonce:
        after, record = _settled(None, start.remembered() or SettingsRecord(), limits, start, 1)
        return Continuation(after, origin, record)
    if remade_at is None:
        ledger = read_hash(store, "create run", keys.ledger("train"))
        require_fields("ledger", keys.ledger("train"), ledger)
        remade_at = int(ledger["taken"]) + 1
    return _continued(keys.run, meta, limits, origin, remade_at, start)


def _continued(
    name: str,
    meta: Mapping[str, str],
    limits: RunLimits,
    origin: Origin | None,
    step: int,
    start: Start,
) -> Continuation:
    """Return the settings of a run that takes over `limits` and `origin` from train step `step`."""
    before = RunLimits.from_meta(meta)
    record = SettingsRecord.from_meta(meta)
    known = Origin.from_meta(meta)
    version = meta.get("limits_version", "0")
    refused = [*known.contradictions(origin)] if origin and known else []
    if not start.by_hand:
        _refuse(name, refused)
        return Continuation(before, known, record, version)
    after, settled = _settled(before, record, limits.keeping_tasks_of(before), start, step)
    tasks = [task for task in before.tasks if not after.tasks[task].is_gone]
    if any(before.token_lead(task) != after.token_lead(task) for task in tasks):
        refused.append(
            "the difference of [policy] max_staleness and max_token_staleness is another one: the "
            "pools are ordered by it"
        )
    if before.columns and before.columns != after.columns:
        now = after.columns or "left out"
        refused.append(f"[run] columns is {now}, but groups refer to files in {before.columns}")
    _refuse(name, refused)
    changes = [f"{change}, from step {step} on" for change in _changes(before, after)]
    if origin and known:
        changes += [
            f"{change}, once a producer starts with it" for change in known.resized(origin).values()
        ]
        origin = known.adopting(origin, draws=False)
    return Continuation(after, origin or known, settled, version, changes)


def _settled(
    before: RunLimits | None, known: SettingsRecord, limits: RunLimits, start: Start, step: int
) -> tuple[RunLimits, SettingsRecord]:
    """Return the limits of a config, from train step `step`, with live values that still fit it."""
    config = SettingsRecord(configured=setting_values(limits), written=dict(start.written))
    kept = config.model_copy(update={"overrides": known.kept_by(config)})
    for record in (kept, *(kept.without([name]) for name in kept.overrides)):
        try:
            return _with_overrides(before, record, limits, step), record
        except ConfigError:
            continue
    return _with_overrides(before, config, limits, step), config


def _with_overrides(
    before: RunLimits | None, record: SettingsRecord, limits: RunLimits, step: int
) -> RunLimits:
    values = {name: override.value for name, override in record.overrides.items()}
    # a change of weights holds from a later step on, which was decided when it was made
    weights = {task_of(name): values.pop(name) for name in [*values] if name.endswith(".weight")}
    after = LiveSettings.of(values).applied(limits, step - 1)
    if before and before.newest_weights() == {**after.newest_weights(), **weights}:
        after.reweighted = before.reweighted
    elif weights:
        after.reweighted = [reweighting(after, weights, step)]
    return after


def _changes(before: RunLimits, after: RunLimits) -> Iterator[str]:
    was, now = _values(before), _values(after)
    gone = [name for name, task in (*before.tasks.items(), *after.tasks.items()) if task.is_gone]
    for name in dict.fromkeys([*was, *now]):
        task = task_of(name)
        is_told = not task or (task in before.tasks and task not in gone)
        if is_told and was.get(name) != now.get(name):
            old, new = (
                "the run's" if value is None and task else str(value)
                for value in (was.get(name), now.get(name))
            )
            yield f"{name}: {old} → {new}"
    for name, limits in after.tasks.items():
        former = before.tasks.get(name)
        if former is None or (former.is_gone and not limits.is_gone):
            yield f"task {name} is {'new' if former is None else 'back'}"
        elif limits.is_gone and not former.is_gone:
            yield (
                f"task {name} is gone (its groups are kept until it is back; `rolloutmq drop "
                f"--task {name} --yes` drops them)"
            )


def _values(limits: RunLimits) -> dict[str, object]:
    """Return all values of the limits, by the names of settings where they have one."""
    others = {"tasks", "reweighted", "token_threshold", *THRESHOLDS.values()}
    values = {**limits.model_dump(exclude=others), **setting_values(limits)}
    values["max_token_staleness"] = limits.token_threshold
    for name, task in limits.tasks.items():
        fixed = task.model_dump() if task.eval_of else {"strategy": task.strategy, "eval_of": None}
        values |= {f"{TASK}{name}.{key}": value for key, value in fixed.items()}
    return values


# -- what the run draws from -----------------------------------------------------------------------


def read_origin(store: Store, keys: Keys) -> Origin | None:
    """Return what the run draws from; None where it has no record of that."""
    return Origin.from_meta(read_hash(store, "config", keys.meta))


def check_origin(store: Store, keys: Keys, origin: Origin) -> None:
    """Raise ConfigError if the run draws from other data than a process with `origin` would."""
    known = read_origin(store, keys)
    _refuse(keys.run, [*known.contradictions(origin)] if known else [])


def record_origin(store: Store, keys: Keys, origin: Origin, producer: str) -> list[str]:
    """Record what the active producer, with this nonce, draws from; return the changed group sizes.

    Each has the first draw that may have the new size.
    Raises ConfigError as `check_origin` does, Fenced, RunNotFound.
    """
    operation = new_nonce()
    while True:
        meta = read_hash(store, "config", keys.meta)
        known = Origin.from_meta(meta)
        _refuse(keys.run, [*known.contradictions(origin)] if known else [])
        updated = known.adopting(origin, draws=True) if known else origin
        if updated == known:
            return []
        version = int(meta.get("limits_version", 0))
        fields = [FIELD, updated.model_dump_json()]
        if write_meta(store, keys, operation, version, fields, producer):
            break
    changes = []
    for task, change in known.resized(origin).items() if known else ():
        draw = read_hash(store, "config", keys.progress(task)).get("cursor", "0")
        changes.append(f"{change}, from draw {draw} on")
    return changes


def _refuse(name: str, reasons: list[str]) -> None:
    if reasons:
        raise ConfigError(
            "\n  ".join([f"this config cannot continue run {name!r}:", *reasons]),
            hint="undo these edits; or start a new run with another [run] name, which may begin "
            "with the weights of this one ([policy] model = a checkpoint's model folder)",
        )
