"""Load a run from a snapshot: it cannot be opened before it is complete; a failure leaves nothing.

Until the real `meta` is written, last and in one step, it has the schema LOADING and a nonce of the
loader. Every transaction checks the nonce and counts itself: repeats change nothing (I13). A loader
that counted as dead ends at its next transaction; before it, it may write a few more payloads.
"""

from __future__ import annotations

import secrets
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import redis

from buffer.errors import Fenced, RolloutMQError, RunExists, SchemaVersionError, SnapshotError
from buffer.ledger.account import Account
from buffer.limits import LOADING, SCHEMA, RunLimits
from buffer.maintenance.remove_run import clear_keys
from buffer.redis.keys import Keys
from buffer.redis.media_folder import SCHEME, MediaFolder
from buffer.redis.scripts import Advance
from buffer.redis.store import RunContext, Store
from buffer.snapshot.folder import (
    INDEX,
    MEDIA,
    PAYLOADS,
    Item,
    read_items,
    read_manifest,
    sync_all,
    verify,
)

SILENT_MS = 60_000
"""Silence after which a loader counts as dead; the next one removes what it left."""

_ITEMS_AT_ONCE = 100  # in one transaction, each with up to a page of members or entries

_PAYLOADS_AT_ONCE = 8  # chunks in one round trip

_OTHER_NAME = {
    "hint": "restore under another name: name=...",
    "command_hint": "restore under another name with --run NAME",
}
_OTHER_FOLDER = {
    "hint": "name a new folder: media=Path(...)",
    "command_hint": "name a new folder with --media FOLDER",
}


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
        self.keys = Keys(name or self.facts.run)
        self._media = self._media_folder(media)
        self._nonce = f"{LOADING}-{secrets.token_hex(16)}"

    def load(self, advance: Advance) -> None:
        """Verify and load the folder, or change nothing. Raises SnapshotError, RunExists."""
        verify(self._folder, self.facts)
        self._refuse_leftovers()
        was_interrupted = self._store.retrying("restore", self._claim_name)
        try:
            if was_interrupted:
                self._clear()
            self._write_index(advance)
            self._write_payloads(advance)
            self._prove()
            with self._restored_media() if self._media else nullcontext():
                self._publish()
        except BaseException as error:
            self._undo(error)
            raise

    # -- the name --------------------------------------------------------------

    def _refuse_leftovers(self) -> None:
        """Raise RunExists for keys without a `meta`, of a run that lost it, which must stay."""

        def find() -> Iterator[bytes]:
            if not self._store.bulk.exists(self.keys.meta):
                for _, client in self._store.servers.masters():
                    yield from client.scan_iter(f"{self.keys.prefix}*", count=2000)

        if left := self._store.retrying("restore", lambda: next(find(), None)):
            raise RunExists(
                f"the server holds keys of a run {self.keys.run!r}, such as {left.decode()}; "
                "nothing was changed",
                **_OTHER_NAME,
            )

    def _claim_name(self) -> bool:
        """Take the name; return whether an interrupted load had it before. Raises RunExists."""
        with self._watching() as pipe:
            nonce, schema, seen_ms = pipe.hmget(self.keys.meta, "nonce", "schema", "seen_ms")
            now_ms = _now_ms(pipe)
            if nonce and schema != LOADING.encode():
                raise RunExists(
                    f"there is a run {self.keys.run!r} on this server; nothing was changed",
                    **_OTHER_NAME,
                )
            is_ours = nonce == self._nonce.encode()
            if nonce and not is_ours and now_ms - int(seen_ms) < SILENT_MS:
                raise RunExists(
                    f"another process is loading the run {self.keys.run!r}, or just did",
                    hint=f"if it died, try again after {SILENT_MS // 1000} s of silence",
                )
            claim = {"nonce": self._nonce, "schema": LOADING, "created_ms": now_ms}
            pipe.multi()
            pipe.hset(self.keys.meta, mapping=claim | {"seen_ms": now_ms, "loaded": 0})
            pipe.execute()
        return bool(nonce)

    def _undo(self, error: BaseException) -> None:
        """Remove what was loaded; if that fails, add it to the error's hint."""
        try:
            self._clear()
            self._change(lambda pipe: pipe.unlink(self.keys.meta))
        except RolloutMQError as also:
            if isinstance(error, RolloutMQError):
                left = f"cannot remove what was loaded ({also.message}); the next restore does"
                error.hint = error.command_hint = left

    def _clear(self) -> None:
        """Remove all keys but `meta`, slice by slice while the name is ours. Raises Fenced."""
        self._require_name()
        clear_keys(self._store, self.keys, (self.keys.meta,), lambda _: self._require_name())

    def _require_name(self) -> None:
        """Raise Fenced if another loader has taken the name; else show it that this one lives."""
        self._change(lambda pipe: None)

    # -- the load ----------------------------------------------------------------

    def _write_index(self, advance: Advance) -> None:
        items = read_items(self._folder / INDEX)
        number = done = 0
        while batch := list(islice(items, _ITEMS_AT_ONCE)):
            number += 1
            done += len(batch)

            def fill(pipe: Any, batch: list[Item] = batch) -> None:
                for item in batch:
                    _send(pipe, self.keys.prefix + item.key, item)

            self._change(fill, number)
            advance("items", done)

    def _write_payloads(self, advance: Advance) -> None:
        items = read_items(self._folder / PAYLOADS)
        done = 0
        while batch := list(islice(items, _PAYLOADS_AT_ONCE)):
            self._require_name()
            commands = [("SET", self.keys.prefix + item.key, item.data) for item in batch]
            self._store.write("restore", commands)
            done += len(batch)
            advance("payloads", done)

    def _prove(self) -> None:
        """Check that what was loaded adds up (I1). Raises SnapshotError."""
        limits = RunLimits.from_meta(self.facts.meta)
        audit = Account(RunContext(self._store, self.keys, limits)).totals()
        if not audit.clean:
            raise SnapshotError(
                f"{self._folder}: its account does not add up: {'; '.join(audit.faults)}",
                hint="it did not add up when it was saved; nothing was loaded",
            )

    def _publish(self) -> None:
        media = {"media": orjson.dumps(str(self._media.root)).decode()} if self._media else {}

        def replace(pipe: Any) -> None:
            pipe.delete(self.keys.meta)
            pipe.hset(self.keys.meta, mapping=self.facts.meta | media)

        self._change(replace, done=self.facts.meta["nonce"])

    # -- media files ---------------------------------------------------------------

    def _media_folder(self, named: Path | None) -> MediaFolder | None:
        """Return the folder for the run's media files, which is empty; None if it has none."""
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
                **_OTHER_FOLDER,
            )
        root = named.resolve() if named else Path(was)
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise SnapshotError(
                f"the run's files belong in {root}, which is not empty; nothing was changed",
                **_OTHER_FOLDER,
            )
        return MediaFolder(root, self.keys.run, self.facts.meta["nonce"])

    @contextmanager
    def _restored_media(self) -> Iterator[None]:
        """Write the media folder, and remove it on an error. Raises SnapshotError."""
        assert self._media
        root = self._media.root
        written = root.with_name(f".{root.name}.{secrets.token_hex(4)}.tmp")
        try:
            try:
                _extract(
                    self._folder / MEDIA,
                    MediaFolder(written, self._media.run, self._media.nonce),
                )
                written = written.rename(root)
            except (OSError, tarfile.TarError) as error:
                raise SnapshotError(f"cannot restore files to {root}: {error}") from error
            yield
        except BaseException:
            shutil.rmtree(written, ignore_errors=True)
            raise

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
                seen = {"seen_ms": _now_ms(pipe)} | ({"loaded": number} if number else {})
                pipe.multi()
                pipe.hset(self.keys.meta, mapping=seen)
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


def _extract(archive: Path, media: MediaFolder) -> None:
    media.claim()
    with tarfile.open(archive) as tar:
        for member in tar:
            path = media.path(f"{SCHEME}{member.name}")  # raises ConfigError for other names
            path.parent.mkdir(exist_ok=True)
            if content := tar.extractfile(member):
                with content, path.open("wb") as stream:
                    shutil.copyfileobj(content, stream)
    sync_all(media.root)


def _now_ms(pipe: Any) -> int:
    seconds, micros = pipe.time()
    return int(seconds) * 1000 + int(micros) // 1000


def _send(pipe: Any, key: str, item: Item) -> None:
    match item.kind:
        case "hash":
            pipe.execute_command("HSET", key, *item.data)
        case "zset":
            pipe.execute_command("ZADD", key, *_scores_first(item.data))
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


def _scores_first(pairs: list[Any]) -> Iterable[Any]:
    for member, score in zip(pairs[::2], pairs[1::2], strict=True):
        yield from (score, member)
