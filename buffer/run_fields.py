"""Read the hashes of a run, and say what is wrong with the one that describes it."""

from __future__ import annotations

from typing import Any

from buffer.errors import RunDamaged, RunNotFound, SchemaVersionError, StoreError
from buffer.model.limits import LOADING, REMOVING, SCHEMA, RunLimits
from buffer.store.key_fields import HINT, require_fields, text_fields
from buffer.store.keys import Keys
from buffer.store.store import Store


def read_hash(store: Store, what: str, key: str) -> dict[str, str]:
    """Return the fields of a hash of the run; {} without it. Raises RunDamaged."""
    try:
        raw: Any = store.retrying(what, lambda: store.control.hgetall(key))
    except StoreError as error:
        if "WRONGTYPE" in error.message:
            raise RunDamaged(f"{key} is of another type", hint=HINT) from error
        raise
    return text_fields(raw)


def without_meta(keys: Keys) -> RunDamaged:
    """Return the error of a run whose `meta` is gone, and which is not a new run."""
    return RunDamaged(
        f"{keys.meta} is gone, and other keys of run {keys.run!r} are there",
        hint=f"restore the data of the server; or delete {keys.control}, then run "
        "`rolloutmq create CONFIG` and `rolloutmq fsck --repair`",
    )


def limits_in(key: str, meta: dict[str, str]) -> RunLimits:
    """Return the limits in the fields of a meta hash. Raises RunDamaged."""
    require_fields("meta", key, meta)
    if missing := [name for name in RunLimits.model_fields if name not in meta]:
        raise RunDamaged(f"{key} has no field {missing[0]}", hint=HINT)
    try:
        return RunLimits.from_meta(meta)
    except ValueError as error:
        raise RunDamaged(f"{key} does not hold the limits of a run: {error}", hint=HINT) from error


def require_schema(name: str, meta: dict[str, str]) -> None:
    """Raise RunNotFound or SchemaVersionError for a run that cannot be opened."""
    if not meta:
        raise RunNotFound(
            f"there is no run {name!r} on this server",
            hint="Run.names lists the runs of a server, Run.create makes one",
            command_hint="`rolloutmq runs` lists the runs of a server, `rolloutmq create CONFIG` "
            "makes one",
        )
    schema = meta.get("schema")
    if schema is None:
        raise RunDamaged(f"{Keys(name).meta} has no field schema", hint=HINT)
    if schema == LOADING:
        raise RunNotFound(
            f"run {name!r} is being restored from a snapshot, or that was interrupted",
            hint="wait until it is done; `rolloutmq restore` deletes what an interrupted one left",
        )
    if schema == REMOVING:
        raise RunNotFound(
            f"run {name!r} is being removed, or its removal was interrupted",
            hint=f"`rolloutmq runs --delete {name} --yes` completes it",
        )
    if schema != SCHEMA:
        raise SchemaVersionError(f"run {name!r} has schema {schema}; this version knows {SCHEMA}")
