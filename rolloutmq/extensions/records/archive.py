"""The trained batches of a run as files in a folder or a bucket, such as step-0000041.rmq.

    the trainer dies                 what stays
      while it writes                a hidden folder, deleted by the next trainer; the batch is on
                                     the server, and is written again
      between the file and `forget`  the file; the next trainer writes the same bytes again

A file is whole once it has its name. As in `steps.jsonl`, writing a step deletes the files of later
steps: they are of a history that was left.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from buffer.errors import LONGEST_REASON, ConfigError, RolloutMQError
from buffer.imports import import_extra
from buffer.job import PayloadRef
from buffer.manifest import Manifest
from buffer.observers import Observer
from buffer.redis.payloads import Whole
from buffer.redis.retry import Backoff
from buffer.redis.whole_file import sync
from buffer.run.run import Run
from buffer.wire.columns import large_columns
from buffer.wire.group import RolloutGroup
from rolloutmq.config.config import Config
from rolloutmq.extensions.records.step_file import RecordDamaged, StepFacts, StepFile, step_writer
from rolloutmq.launch.terms import FOLDER as TERMS
from rolloutmq.versions import all_versions

log = logging.getLogger("rolloutmq.trainer")

BACKOFF = Backoff(1.0, 60.0, jitter=0.0)  # between attempts to write to a full disk, or a bucket
LAST_TRIES = 3  # at the end of the trainer

_ARCHIVED = re.compile(r" archived_ms=\d+")  # when the server archived a batch, a time
_name = "step-{:07d}.rmq".format
_NAME = re.compile(r"step-(\d{7,})\.rmq")


ArchivePlace = Annotated[
    str | None,
    Option(
        "--archive",
        metavar="PLACE",
        help="Folder or URL of its archive. Default: `archive` in the run's folder.",
    ),
]


class ArchiveFailed(RolloutMQError):
    """Raised where an archive cannot be read or written."""


class FolderShelf:
    """Keeps files by name; a file is there with all of its bytes, or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        return [path.name for path in self._folder.glob("*")]

    def get(self, name: str) -> bytes:
        """Return the bytes of a file. Raises FileNotFoundError."""
        return (self._folder / name).read_bytes()

    def scratch(self) -> Path:
        """Return a folder in which a file may be made for `put`, after deleting what is in it."""
        folder = self._folder / ".new"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def put(self, name: str, file: Path) -> None:
        """Store a file, which may be moved away."""
        sync(file)
        file.replace(self._folder / name)
        sync(self._folder)

    def drop(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)


class BucketShelf:
    """As `FolderShelf`, objects under a URL; credentials are in the environment, as for weights."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._obstore = import_extra("obstore", f"[retention] folder = {url!r}")

    @cached_property
    def _store(self) -> Any:
        options = {"mkdir": True} if self._url.startswith("file:") else {}
        return self._obstore.store.from_url(self._url, **options)

    def names(self) -> list[str]:
        return [found["path"] for page in self._store.list() for found in page]

    def get(self, name: str) -> bytes:
        return bytes(self._store.get(name).bytes())

    def scratch(self) -> None:
        return None  # that of the system

    def put(self, name: str, file: Path) -> None:
        self._store.put(name, file)

    def drop(self, name: str) -> None:
        self._store.delete(name)


class Archive:
    """The step files of one run at `place`, a folder or a URL. Raises ArchiveFailed."""

    def __init__(self, place: str | Path) -> None:
        self.place = str(place)
        is_url = "://" in self.place
        self._shelf = BucketShelf(self.place) if is_url else FolderShelf(Path(place))

    def steps(self) -> list[int]:
        with self._failing():
            found = map(_NAME.fullmatch, self._shelf.names())
            return sorted(int(match[1]) for match in found if match)

    def open(self, step: int) -> StepFile:
        """Return the file of a step. Raises RecordDamaged."""
        data, name = self.raw(step), _name(step)
        file = StepFile(f"{self.place.rstrip('/')}/{name}", BytesIO(data))
        if file.facts.step != step:
            raise RecordDamaged(
                f"{file.name} has the batch of step {file.facts.step}",
                hint="give the files of the archive their own names",
            )
        return file

    def raw(self, step: int) -> bytes:
        """Return the bytes of the file of a step."""
        data = self.read(_name(step))
        if data is None:
            steps = self.steps() or [0]
            raise ArchiveFailed(
                f"{self.place} has no file of step {step}: its steps are {steps[0]} to {steps[-1]}",
                hint="name one of them, or put a copy of the file there",
            )
        return data

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file; None without it."""
        with self._failing(), suppress(FileNotFoundError):
            return self._shelf.get(name)
        return None

    @contextmanager
    def new_file(self, name: str) -> Iterator[Path]:
        """Store what the block writes to a path, unless it raises."""
        with self._failing(), tempfile.TemporaryDirectory(dir=self._shelf.scratch()) as folder:
            file = Path(folder) / name
            yield file
            self._shelf.put(name, file)

    @contextmanager
    def new_step(self, step: int) -> Iterator[Path]:
        """Store what the block writes as the file of a step, after deleting those of later ones."""
        with self.new_file(_name(step)) as file:
            yield file
            for later in self.steps():
                if later > step:
                    self._shelf.drop(_name(later))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except RolloutMQError:
            raise
        except Exception as error:  # the kinds of errors of a bucket depend on its provider
            text = " ".join(str(error).partition("Debug source:")[0].split())[:LONGEST_REASON]
            hint = "check the folder or bucket, its free space, and the rights of this process"
            raise ArchiveFailed(f"{self.place}: {text}", hint=hint) from error


def archive_of(parent: Path, place: str | None) -> Archive:
    """Return the archive of a run, at `place` or in its folder. Raises ConfigError if empty."""
    archive = Archive(place or parent / "archive")
    if not archive.steps():
        raise ConfigError(
            f"no step of the run in {parent} is archived in {archive.place}",
            hint="name another run, or the place of its archive (--archive); a run has one if "
            '[retention] policy = "archive" was set before it trained',
        )
    return archive


def archive_run(run: Run, process: str, config: Config) -> None:
    """Archive the batches that this trainer commits, if the run does that."""
    if process == "trainer" and run.limits.archive:
        import_extra("zstandard", '[retention] policy = "archive"')
        run.observers.append(Archiver(run, config.public(), config.run.folder / TERMS))


def audit(run: Run) -> list[str]:
    """Return, for `rolloutmq fsck`, where the archive of a run is not what was trained.

    Every step from the first file on must have one. Only those are read that the server still has,
    so that the time does not grow with the run; `rolloutmq prove` reads all.
    """
    if not run.limits.archive:
        return []
    archive, faults = Archive(run.limits.archive), list[str]()
    exported, kept = run.ledger.archive.exported(), run.ledger.archive.steps()
    committed = run.ledger.steps().committed
    try:
        there = archive.steps()
        last = max([exported, *there])  # files are written in order
        missing = {*range(there[0] if there else 1, last + 1)} - {*there}
        faults += [f"{archive.place} lacks the batch of step {step}" for step in sorted(missing)]
        for step in sorted({*there} & {*range(kept.start, committed + 1)}):
            file, found = archive.open(step), run.ledger.manifest(step)
            file.check()
            if found and _lines(found) != file.facts.manifest:
                faults.append(f"{file.name} is not the batch that the server has")
    except RolloutMQError as error:
        faults.append(error.message)
    return faults


class Archiver(Observer):
    """Copies committed batches to the archive in a thread, then lets the server free them."""

    def __init__(self, run: Run, config: dict[str, Any], terms: Path) -> None:
        """`config`: of this trainer; `terms`: folder of what its steps are trained under."""
        self._run = run
        self._terms = terms
        self._kept: set[Path] = set()  # terms that are in the archive
        self._archive = Archive(run.limits.archive)
        self._config = config
        self._versions = all_versions()
        self._done = run.ledger.archive.exported()
        self._news = threading.Event()
        self._ended = threading.Event()
        # a trainer that died may have left some
        self._news.set()
        self._thread = threading.Thread(target=self._follow, name="archive", daemon=True)
        self._thread.start()

    def committed(self, step: int, began_ns: int) -> None:
        self._news.set()

    def closed(self) -> None:
        """Wait until all committed batches are archived, unless that fails."""
        self._ended.set()
        self._news.set()
        self._thread.join()

    def _follow(self) -> None:
        failures = 0
        while True:
            self._news.wait()
            self._news.clear()
            is_last = self._ended.is_set()
            try:
                self._copy_new()
                failures = 0
                if is_last:
                    return
            # a thread that ended would hold the batches on the server for good
            except Exception as error:
                failures += 1
                is_known = isinstance(error, (RolloutMQError, OSError))
                what = "not archived, at try %d; the server keeps the batches: %s"
                log.error(what, failures, error, exc_info=not is_known)
                if is_last and failures >= LAST_TRIES:
                    return
                self._ended.wait(BACKOFF.pause_s(failures))
                self._news.set()

    def _copy_new(self) -> None:
        ledger = self._run.ledger
        _, committed, freed = ledger.steps()
        for file in {*self._terms.glob("*.json")} - self._kept:
            with self._archive.new_file(file.name) as copy:
                shutil.copyfile(file, copy)
            self._kept.add(file)
        first, lost = max(self._done + 1, ledger.archive.steps().start), set[int]()
        for step in range(first, committed + 1):
            if manifest := ledger.manifest(step):
                self._copy(manifest)
            else:
                lost.add(step)
            self._done = step
            # those that a kept checkpoint may need again are copied at each start of a trainer
            ledger.archive.forget(exported=min(step, freed))
        # a run that was made from a checkpoint has files of the steps before it
        if lost and (missing := lost - {*self._archive.steps()}):
            log.error("the server has lost %d batches, first %d", len(missing), min(missing))

    def _copy(self, manifest: Manifest) -> None:
        run = self._run
        facts = StepFacts(
            run=run.name,
            run_nonce=run.nonce,
            step=manifest.step,
            manifest=_lines(manifest),
            config=self._config,
            versions=self._versions,
            threads=torch.get_num_threads() if (torch := sys.modules.get("torch")) else 0,
            ranks=int(os.environ.get("WORLD_SIZE", "1")),
        )
        refs = [entry.payload for entry in manifest.entries]
        with self._archive.new_step(manifest.step) as path, step_writer(path, facts) as add:

            def add_groups(batch: Sequence[PayloadRef], found: Sequence[Whole]) -> list[None]:
                return [
                    add(f"groups/{ref.gid}", data) for ref, data in zip(batch, found, strict=True)
                ]

            run.payloads.read_each(refs, add_groups)
            if root := run.columns.root:
                for name in (n for group in run.buffer.read_many(refs) for n in files_of(group)):
                    add(f"columns/{name}", (root / name).read_bytes())


def _lines(manifest: Manifest) -> list[str]:
    """Return the lines as the trainer got them."""
    header, *entries = manifest.lines
    return [_ARCHIVED.sub("", header), *entries]


def files_of(group: RolloutGroup) -> list[str]:
    """Return the files of large columns that a group names, without their checksums."""
    values = [column.get(state) for state in group.states for column in large_columns().values()]
    return [value.partition("#")[0] for value in values if isinstance(value, str)]
