"""The files of a run in its snapshot: read group by group, in parts; restored to a new folder, all of them or none."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from buffer.errors import SnapshotError
from buffer.media import SCHEME, MediaFolder
from buffer.snapshot.folder import Item

PART_BYTES = 2**20
"""One item holds at most so much of a file."""


def file_items(media: MediaFolder, gids: Iterable[str]) -> Iterator[Item]:
    """The files of those groups; an empty one is an item, too."""
    for gid in gids:
        for name in media.names(gid):
            with (media.root / gid / name).open("rb") as stream:
                offset, part = 0, stream.read(PART_BYTES)
                while part or not offset:
                    yield Item("file", f"media:{gid}:{name}", [offset, part])
                    offset += max(len(part), 1)
                    part = stream.read(PART_BYTES)


def require_empty(media: MediaFolder) -> None:
    """SnapshotError where something is in the way of a restored folder."""
    if media.root.exists() and (not media.root.is_dir() or any(media.root.iterdir())):
        raise SnapshotError(
            f"the files of the run belong to {media.root}, which is not empty; nothing was changed",
            hint="name a new folder with --media FOLDER",
        )


@contextmanager
def restored(media: MediaFolder, items: Iterable[Item]) -> Iterator[None]:
    """The folder with these files in it; it is gone again where the block fails. Raises SnapshotError."""
    hidden = MediaFolder(media.root.with_name(f".{media.root.name}.{secrets.token_hex(4)}.tmp"), media.run, media.nonce)
    written = hidden.root
    try:
        try:
            hidden.claim()
            for item in items:
                _append(hidden, item)
            written = hidden.root.rename(media.root)
        except OSError as error:
            raise SnapshotError(f"files could not be restored to {media.root}: {error}") from error
        yield
    except BaseException:
        shutil.rmtree(written, ignore_errors=True)
        raise


def _append(media: MediaFolder, item: Item) -> None:
    _, gid, name = item.key.split(":")
    offset, part = item.data
    path = media.path(f"{SCHEME}{gid}/{name}")
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as stream:
        if stream.tell() != offset:
            raise SnapshotError(f"{item.key}: a part begins at {offset}, {stream.tell()} bytes are there")
        stream.write(part)
        stream.flush()
        os.fsync(stream.fileno())
