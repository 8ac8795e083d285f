"""Load a run from a snapshot: it cannot be opened before it is complete; a failure leaves nothing.

Until the real `meta` is written, last and in one step, it has the schema LOADING and a nonce of the
loader. Every transaction checks the nonce and counts itself: repeats change nothing (I13), and a
loader that counted as dead can write nothing more.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import redis

from buffer.errors import Fenced, RolloutMQError, RunExists, SchemaVersionError, SnapshotError
from buffer.groups.record_walk import PAGE
from buffer.ledger.account import Account
from buffer.model.limits import LOADING, SCHEMA, RunLimits
from buffer.redis.keys import Keys
from buffer.redis.media_folder import MediaFolder
from buffer.redis.script_calls import Advance
from buffer.redis.store import Store
from buffer.snapshot.folder import (
    Item,
    read_items,
    read_manifest,
    require_empty,
    restored,
    verify,
)

SILENT_MS = 60_000
"""Silence after which a loader counts as dead; the next one removes what it left."""

BATCH_BYTES = 4 * 2**20  # payload bytes in one transaction: more would stall the server


class SnapshotLoader:
    def __init__(
        self, store: Store, folder: Path, name: str | None = None, media: Path | None = None
    ) -> None:
        self.facts = read_manifest(folder)
        schema = self.facts.meta.get("schema")
        if schema != SCHEMA:
            raise SchemaVersionError(
                f"{folder} is of a run with schema {schema}; this version reads {SCHEMA}"
            )
        self._store = store.at(Keys(name or self.facts.run).meta)
        self._folder = folder
        self.keys = Keys(name or self.facts.run, spread=self._store.in_cluster)
        self._media = self._media_folder(media)
        self._nonce = f"{LOADING}-{secrets.token_hex(16)}"

    def load(self, advance: Advance) -> None:
        """Verify and load the folder, or change nothing. Raises SnapshotError, RunExists."""
        if self._media:
            require_empty(self._media)
        verify(self._folder, self.facts)
        self._refuse_leftovers()
        was_interrupted = self._store.retrying("restore", self._claim_name)
        try:
            if was_interrupted:
                self._clear()
            for number, (batch, done) in enumerate(self._batches(), start=1):
                self._write(number, batch)
                advance("items", done)
            self._prove()
            with restored(self._media, self._files()) if self._media else nullcontext():
                self._publish()
        except BaseException as error:
            self._undo(error)
            raise

    def _media_folder(self, named: Path | None) -> MediaFolder | None:
        """Return the folder for the run's media files; None if it has none."""
        was = RunLimits.from_meta(self.facts.meta).media
        if not was:
            if named:
                raise SnapshotError(
                    f"run {self.facts.run!r} has no media folder", hint="leave out `media`"
                )
            return None
        if not named and self.keys.run != self.facts.run:
            raise SnapshotError(
                f"{was} is the media folder of run {self.facts.run!r}; two runs cannot share one",
                hint="name a new folder: media=Path(...)",
                command_hint="name a new folder with --media FOLDER",
            )
        return MediaFolder(
            named.resolve() if named else Path(was), self.keys.run, self.facts.meta["nonce"]
        )

    # -- the name --------------------------------------------------------------

    def _refuse_leftovers(self) -> None:
        """Raise RunExists for keys without a `meta`, of a run that lost it, which must stay."""
        if self._store.retrying("restore", lambda: self._store.bulk.exists(self.keys.meta)):
            return
        left = next(self._other_keys(), None)
        if left:
            raise RunExists(
                f"the server holds keys of a run {self.keys.run!r}, such as {left[0]}; "
                "nothing was changed",
                hint="restore under another name: name=...",
                command_hint="restore under another name with --run NAME",
            )

    def _claim_name(self) -> bool:
        """Take the name; return whether an interrupted load had it before. Raises RunExists."""
        with self._watching() as pipe:
            nonce, schema, seen_ms = pipe.hmget(self.keys.meta, "nonce", "schema", "seen_ms")
            now_ms = _now_ms(pipe)
            if nonce and schema != LOADING.encode():
                raise RunExists(
                    f"there is a run {self.keys.run!r} on this server; nothing was changed",
                    hint="restore under another name: name=...",
                    command_hint="restore under another name with --run NAME",
                )
            is_ours = nonce == self._nonce.encode()
            if nonce and not is_ours and now_ms - int(seen_ms) < SILENT_MS:
                raise RunExists(
                    f"another process is loading the run {self.keys.run!r}, or just did",
                    hint=f"if it died, try again after {SILENT_MS // 1000} s of silence",
                )
            claim = {
                "nonce": self._nonce,
                "schema": LOADING,
                "created_ms": now_ms,
                "seen_ms": now_ms,
                "loaded": 0,
            }
            pipe.multi()
            pipe.hset(self.keys.meta, mapping=claim)
            pipe.execute()
        return bool(nonce)

    def _other_keys(self) -> Iterator[list[str]]:
        """Return the run's keys except `meta`, in slices; in a cluster, those of every master."""
        for url, _ in self._store.retrying("restore", self._store.servers.masters):
            cursor = 0
            while True:
                cursor, found = self._store.retrying("restore", partial(self._scan, url, cursor))
                names = [key.decode() for key in found if key.decode() != self.keys.meta]
                if names:
                    yield names
                if cursor == 0:
                    break

    def _scan(self, url: str, cursor: int) -> Any:
        client = dict(self._store.servers.masters())[url]
        return client.scan(cursor, match=self.keys.pattern, count=2000)

    def _clear(self) -> None:
        for names in self._other_keys():
            # keys of other slots last: the transaction before checks that the name is ours
            self._change(partial(_unlink, names=[name for name in names if self._is_in_slot(name)]))
            self._store.each(
                "restore", [("UNLINK", name) for name in names if not self._is_in_slot(name)]
            )

    def _is_in_slot(self, key: str) -> bool:
        """Return whether a key can be part of a transaction: in a cluster, payloads cannot."""
        return key.startswith(self.keys.prefix)

    def _undo(self, error: BaseException) -> None:
        """Remove what was loaded; if that fails, add it to the error's hint."""
        try:
            self._clear()
            self._change(partial(_unlink, names=[self.keys.meta]))
        except RolloutMQError as also:
            if isinstance(error, RolloutMQError):
                left = f"cannot remove what was loaded ({also.message}); the next restore does"
                error.hint = error.command_hint = left

    # -- the load ----------------------------------------------------------------

    def _batches(self) -> Iterator[tuple[list[Item], int]]:
        """Return items in transactions of bounded size, with the number of items up to each."""
        batch: list[Item] = []
        commands = size = done = 0
        for name in self.facts.files:
            for item in read_items(self._folder / name) if not name.startswith("media-") else ():
                batch.append(item)
                done += 1
                commands += len(item.data) if item.kind == "stream" else 1
                size += len(item.data) if item.kind == "string" else 0
                if commands >= PAGE or size >= BATCH_BYTES:
                    yield batch, done
                    batch = []
                    commands = size = 0
        yield batch, done

    def _files(self) -> Iterator[Item]:
        for name in self.facts.files:
            if name.startswith("media-"):
                yield from read_items(self._folder / name)

    def _write(self, number: int, batch: list[Item]) -> None:
        named = [(self.keys.named(item.key), item) for item in batch]

        def fill(pipe: Any) -> None:
            for key, item in named:
                if self._is_in_slot(key):
                    _send(pipe, key, item)
            pipe.hset(self.keys.meta, mapping={"loaded": number})

        self._change(fill, number)
        self._store.each(
            "restore", [("SET", key, item.data) for key, item in named if not self._is_in_slot(key)]
        )

    def _prove(self) -> None:
        """Check that what was loaded adds up (I1). Raises SnapshotError."""
        limits = RunLimits.from_meta(self.facts.meta)
        audit = Account(self._store, self.keys, limits).totals()
        if not audit.clean:
            raise SnapshotError(
                f"{self._folder}: its account does not add up: {'; '.join(audit.faults)}",
                hint="it did not add up when it was saved; nothing was loaded",
            )

    def _publish(self) -> None:
        media = {"media": orjson.dumps(str(self._media.root)).decode()} if self._media else {}

        def replace(pipe: Any) -> None:
            for key in (self.keys.meta,):
                pipe.delete(key)
                pipe.hset(key, mapping=self.facts.meta | media)

        self._change(replace, done=self.facts.meta["nonce"])

    # -- one step --------------------------------------------------------------------

    def _change(self, change: Callable[[Any], object], number: int = 0, done: str = "") -> None:
        """Make one transaction, once, while the name is ours; `number` or nonce `done` marks it."""

        def attempt() -> None:
            with self._watching() as pipe:
                nonce, loaded = pipe.hmget(self.keys.meta, "nonce", "loaded")
                if done and nonce == done.encode():
                    return
                if nonce != self._nonce.encode():
                    raise Fenced(
                        f"run {self.keys.run!r} is loaded by another process: "
                        "this one was silent for too long"
                    )
                if number and int(loaded) >= number:
                    return
                now_ms = _now_ms(pipe)
                pipe.multi()
                pipe.hset(self.keys.meta, "seen_ms", now_ms)
                change(pipe)
                pipe.execute()

        self._store.retrying("restore", attempt)

    @contextmanager
    def _watching(self) -> Iterator[Any]:
        """Open a connection on which a change of `meta` by others makes the store repeat."""
        with self._store.bulk.pipeline() as pipe:
            try:
                pipe.watch(self.keys.meta)
                yield pipe
            except redis.WatchError as error:
                raise redis.ConnectionError(str(error)) from error


def _unlink(pipe: Any, names: list[str]) -> None:
    if names:
        pipe.unlink(*names)


def _now_ms(pipe: Any) -> int:
    seconds, micros = pipe.time()
    return int(seconds) * 1000 + int(micros) // 1000


def _send(pipe: Any, key: str, item: Item) -> None:
    match item.kind:
        case "hash":
            pipe.execute_command("HSET", key, *item.data)
        case "zset":
            pairs = zip(item.data[::2], item.data[1::2], strict=True)
            pipe.execute_command(
                "ZADD", key, *(part for member, score in pairs for part in (score, member))
            )
        case "stream":
            for entry, fields in item.data:
                pipe.execute_command("XADD", key, entry, *fields)
        case "list":
            pipe.rpush(key, *item.data)
        case "bits":
            offset, part = item.data
            pipe.setrange(key, offset, part)
        case "string":
            pipe.set(key, item.data)
