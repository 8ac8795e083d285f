"""Load a run from a snapshot: it cannot be opened before it is complete; a failure leaves nothing.

Until the real `meta` is written, last and in one step, it has the schema LOADING. A loader that was
killed leaves such a run, which `rolloutmq runs --delete NAME` removes; no other loader goes on.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from buffer.errors import RunExists, SchemaVersionError, SnapshotError
from buffer.ledger.account import Account
from buffer.limits import LOADING, SCHEMA, RunLimits
from buffer.maintenance.column_files import ColumnFolder
from buffer.maintenance.remove_run import clear_keys
from buffer.redis.bounds import BYTES_PER_TRIP
from buffer.redis.bulk_io import Command
from buffer.redis.keys import Keys
from buffer.redis.scripts import Advance
from buffer.redis.store import RunContext, Store
from buffer.snapshot.folder import FILES, Item, read_items, read_manifest, verify

MEMBERS_AT_ONCE = 5000  # in one command

_WRITE = {"hash": "HSET", "list": "RPUSH", "set": "SADD", "zset": "ZADD", "string": "SET"}


class SnapshotLoader:
    """Loads the snapshot in `folder` as run `name`, with files of columns in `columns`."""

    def __init__(self, store: Store, folder: Path, name: str | None, columns: Path | None) -> None:
        self.facts = read_manifest(folder)
        self.keys = Keys(name or self.facts.run)
        self._store = store.at(self.keys.meta)
        self._folder = folder
        self._columns = columns
        self._nonce = f"{LOADING}-{secrets.token_hex(16)}"

    def load(self, advance: Advance) -> None:
        """Verify and load the folder, or change nothing. Raises SnapshotError, RunExists."""
        verify(self._folder, self.facts)
        meta = self._meta()
        if self._columns:
            meta["columns"] = f'"{self._columns.resolve()}"'
        files = self._new_files(meta)
        self._claim_name()
        try:
            self._write(advance)
            context = RunContext(self._store, self.keys, RunLimits.from_meta(meta))
            totals = Account(context).totals()
            if not totals.clean:
                raise SnapshotError(
                    f"{self._folder}: its account does not add up: {'; '.join(totals.faults)}",
                    hint="it did not add up when it was saved; nothing was loaded",
                )
            if files and (self._folder / FILES).is_dir():
                shutil.copytree(self._folder / FILES, files, dirs_exist_ok=True)
            self._publish(meta)
        except BaseException:
            clear_keys(self._store, self.keys, (self.keys.meta,))
            self._store.ask("restore", "UNLINK", self.keys.meta)
            if files:
                shutil.rmtree(files, ignore_errors=True)
            raise

    def _meta(self) -> dict[str, str]:
        """Return the run's `meta`. Raises SchemaVersionError for one of another version."""
        found: list[bytes] = next(
            (item.value for item in read_items(self._folder) if item.key == "meta"), []
        )
        texts = [part.decode() for part in found]
        meta = dict(zip(texts[::2], texts[1::2], strict=True))
        if meta.get("schema") != SCHEMA:
            raise SchemaVersionError(
                f"{self._folder} is of a run with schema {meta.get('schema')}; "
                f"this version reads {SCHEMA}"
            )
        return meta

    def _new_files(self, meta: dict[str, str]) -> Path | None:
        """Return where the run's files will lie, which must be empty. Raises SnapshotError."""
        columns = RunLimits.from_meta(meta).columns
        files = ColumnFolder.of_run(columns, self.keys.run, meta["nonce"]).root
        if files and files.exists() and any(files.iterdir()):
            raise SnapshotError(
                f"the run's files belong in {files}, which is not empty; nothing was changed",
                hint="another server may have this run; otherwise delete the folder, or name "
                "another one: columns=Path(...)",
                command_hint="another server may have this run; otherwise delete the folder, or "
                "name another one with --columns FOLDER",
            )
        return files

    def _claim_name(self) -> None:
        """Take the name. Raises RunExists where the server has a key of such a run."""
        meta, name = self.keys.meta, self.keys.run
        claim = ("HSETNX", meta, "nonce", self._nonce)
        # a call is repeated whose reply is lost
        is_mine = self._store.ask("restore", *claim) or (
            self._store.ask("restore", "HGET", meta, "nonce") == self._nonce.encode()
        )
        what = f"a run {name!r}, or what a restore left that was killed"
        if is_mine:
            self._store.ask("restore", "HSET", meta, "schema", LOADING)
            keys = self._store.client.scan_iter(f"{self.keys.prefix}*", count=2000)
            others = (key for key in keys if key != meta.encode())
            left = self._store.retrying("restore", lambda: next(others, None))
            if left is None:
                return
            self._store.ask("restore", "UNLINK", meta)
            what = f"keys of a run {name!r}, such as {left.decode()}"
        raise RunExists(
            f"the server has {what}; nothing was changed",
            hint="restore under another name: name=..., or remove it first",
            command_hint=f"restore under another name with --run NAME, or remove it first: "
            f"rolloutmq runs --delete {name}",
        )

    def _write(self, advance: Advance) -> None:
        sent: list[Command] = []
        size = 0
        for done, item in enumerate(read_items(self._folder), start=1):
            if item.key != "meta":
                key = f"{self.keys.prefix}{item.key}"
                # a call is repeated whose reply is lost, and a scan may have saved a key twice
                sent += [("UNLINK", key), *_commands(key, item)]
                size += len(item.value)
            if size >= BYTES_PER_TRIP or len(sent) >= MEMBERS_AT_ONCE:
                self._store.send("restore", sent)
                sent, size = [], 0
            advance("keys", done)
        self._store.send("restore", sent)

    def _publish(self, meta: dict[str, str]) -> None:
        """Replace the claim by the run's `meta` in one step, unless somebody removed the claim."""

        def attempt() -> None:
            with self._store.client.pipeline() as pipe:
                pipe.watch(self.keys.meta)
                nonce = pipe.hget(self.keys.meta, "nonce")
                if nonce == meta["nonce"].encode():
                    return  # a repeated call
                if nonce != self._nonce.encode():
                    raise SnapshotError(f"run {self.keys.run!r} was removed while it was restored")
                pipe.multi()
                pipe.delete(self.keys.meta)
                pipe.hset(self.keys.meta, mapping=meta)
                try:
                    pipe.execute()
                except redis.WatchError as error:
                    raise redis.ConnectionError(str(error)) from error

        self._store.retrying("restore", attempt)


def _commands(key: str, item: Item) -> Iterator[Command]:
    """Yield the commands that make a key again; a long value is written in parts."""
    if item.kind == "stream":
        for entry, fields in item.value:
            yield ("XADD", key, entry, *fields)
        return
    if item.kind == "string":
        yield ("SET", key, item.value)
        return
    parts: list[Any] = item.value
    if item.kind == "zset":
        parts = [part for n in range(0, len(parts), 2) for part in (parts[n + 1], parts[n])]
    for start in range(0, len(parts), MEMBERS_AT_ONCE * 2):
        yield (_WRITE[item.kind], key, *parts[start : start + MEMBERS_AT_ONCE * 2])
