"""What `meta` says of a run: read, checked, and changed by one script. It reports damage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from buffer.errors import RunDamaged, RunNotFound, SchemaVersionError
from buffer.limits import LOADING, REGENERATING, REMOVING, SCHEMA, RunLimits
from buffer.redis.key_fields import HINT, require_fields, text_fields
from buffer.redis.keys import Keys
from buffer.redis.scripts import Arg, unfenced, unknown_reply
from buffer.redis.store import Store
from buffer.run.settings import SettingsRecord

_UNFINISHED = {
    LOADING: (
        "restored from a snapshot",
        "wait until it is done; `rolloutmq restore` deletes what an interrupted one left",
    ),
    REMOVING: ("removed", "`rolloutmq runs --delete {} --yes` completes it"),
    REGENERATING: (
        "made again from a checkpoint",
        "repeat the command with --regenerate, which completes it",
    ),
}


def read_hash(store: Store, what: str, key: str) -> dict[str, str]:
    """Return the fields of a hash of the run; {} without it. Raises RunDamaged."""
    return text_fields(store.ask(what, "HGETALL", key))


def read_meta(store: Store, keys: Keys) -> tuple[dict[str, str], RunLimits]:
    """Return `meta` and its limits. Raises RunNotFound, SchemaVersionError, RunDamaged."""
    meta = read_hash(store, "open run", keys.meta)
    if not meta and store.ask("open run", "EXISTS", keys.control):
        # a run that was created between these two reads has both
        meta = read_hash(store, "open run", keys.meta)
        if not meta:
            raise without_meta(keys)
    require_schema(keys.run, meta)
    return meta, limits_in(keys.meta, meta)


def limits_in(key: str, meta: dict[str, str]) -> RunLimits:
    """Return the limits in the fields of a meta hash. Raises RunDamaged."""
    require_fields("meta", key, meta)
    if missing := [name for name in RunLimits.model_fields if name not in meta]:
        raise RunDamaged(f"{key} has no field {missing[0]}", hint=HINT)
    try:
        SettingsRecord.from_meta(meta)
        return RunLimits.from_meta(meta)
    except ValueError as error:
        raise RunDamaged(f"{key} does not hold the limits of a run: {error}", hint=HINT) from error


def without_meta(keys: Keys) -> RunDamaged:
    return RunDamaged(
        f"{keys.meta} is gone, and other keys of run {keys.run!r} are there",
        hint="`rolloutmq run CONFIG --regenerate` makes the run again from its newest checkpoint",
    )


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
    if schema in _UNFINISHED:
        what, hint = _UNFINISHED[schema]
        raise RunNotFound(
            f"run {name!r} is being {what}, or that was interrupted", hint=hint.format(name)
        )
    if schema != SCHEMA:
        raise SchemaVersionError(f"run {name!r} has schema {schema}; this version knows {SCHEMA}")


def write_meta(
    store: Store,
    keys: Keys,
    operation: str,
    version: int,
    fields: Sequence[str],
    producer: str = "",
) -> bool:
    """Store fields of `meta`; return False if its settings changed since `version` was read.

    `producer`: the nonce of a producer that makes the change; "" for all others. Raises Fenced,
    RunNotFound.
    """
    args: dict[str, Arg] = {"operation": operation, "version": version, "producer": producer}
    reply: Any = store.call("set_limits", keys.slots(), args, tail_args=fields, durable=True)
    match unfenced(reply, "producer"):
        case ["OK", _]:
            return True
        case ["CONFLICT", _]:
            return False
        case ["NO_RUN"]:
            raise RunNotFound(f"there is no run {keys.run!r} any more")
        case other:
            raise unknown_reply("set_limits", other)
