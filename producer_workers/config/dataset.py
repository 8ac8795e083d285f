"""[tasks.<name>.dataset]: the source of a task's prompts, one section per kind of data set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from buffer.config.attached import AttachedKinds
from buffer.config.section import YEAR_S, Count, DottedPath, Section
from buffer.errors import ConfigError
from buffer.limits import Bytes
from producer_workers.hub import Repository, is_id, repository

LARGEST_ROW = 2**25
"""Bytes of a row as it is stored, without images. Some 16 times as much memory reads it; of what it
becomes, a group stores 1 MB.
"""


class ImagesSection(Section):
    """[tasks.<name>.dataset.images]: the limits of images that rows name."""

    root: Path | None = None
    """folder of the image files, which no row may leave; default: the folder of the data set's file
    """
    max_bytes: Annotated[Bytes, Field(gt=0, le=1 << 32)] = 20 << 20
    """largest size of an image file"""
    max_pixels: Count = Field(1 << 24, ge=1)
    """largest number of pixels of an image, checked before it is decoded"""
    max_images: int = Field(8, ge=1, le=1024)
    """largest number of images of a row"""


class DatasetKind(Section):
    """The section of a kind of data set, with what the kind says about itself.

    Each makes `kind` a literal: the word that a config names.
    """

    reader: ClassVar[str]
    """module:function that opens the rows: (section, problems_dir, split, seed) -> Dataset"""
    is_generated: ClassVar[bool] = False
    """whether its problems are written to the run's folder, with splits of their own"""
    agent_loop: ClassVar[str | None] = None
    """the agent loop of tasks that name no other"""
    loop_keys: ClassVar[tuple[str, ...]] = ()
    """keys of the data set that are arguments of that loop, too"""
    package: ClassVar[str | None] = None
    """a package of others whose code gives the rows, in a process of its own"""

    kind: str
    """the kind of data set"""

    @property
    def files(self) -> Path | None:
        """Return the file or folder of the rows; None for rows that are made."""
        return None

    @property
    def repository(self) -> Repository | None:
        """Return the repository of the data set on the Hub; None for one that is here."""
        return None

    @property
    def code(self) -> dict[str, str]:
        """Return the functions of the user's that give rows, by what they are."""
        return {}

    def count_held_out(self) -> int | None:
        """Return the number of problems for evaluation; None where the config does not show it.

        Raises ConfigError for a file that cannot be read.
        """
        return None


FieldName = Literal["question", "prompt", "messages", "answer", "ground_truth", "data_source"]


class RecordsSection(DatasetKind):
    """A data set whose rows are records in a form of the user's."""

    fields: dict[FieldName, str] = Field(default_factory=dict)
    """names that fields have in these records, for example { question = "problem" }"""
    record: DottedPath | None = None
    """a function of yours as package.module:function that turns one record (a dict) into a problem;
    default: records have the fields of JSONL files
    """
    row_timeout_s: float = Field(300.0, gt=0, le=YEAR_S)
    """time in which your `record` function, or your data set, gives one row, or is opened; then its
    process is killed, and the row counts as one that cannot be read
    """
    images: ImagesSection | None = None
    """allow rows to name images, within these limits; default: rows have no images"""

    @property
    def code(self) -> dict[str, str]:
        """Return the function that turns records into problems, if there is one."""
        return {"record function": self.record} if self.record else {}

    @property
    def largest_row(self) -> int:
        """Return the most bytes of a row, in which images may be base64."""
        images = self.images
        return LARGEST_ROW + (images.max_images * images.max_bytes * 4 // 3 if images else 0)


class StoredSection(DatasetKind):
    path: Path
    """the file"""

    @property
    def files(self) -> Path:
        """Return the file or folder."""
        return self.path


class _Files(StoredSection, RecordsSection): ...


class JsonlSection(_Files):
    """[tasks.<name>.dataset] kind = "jsonl": a file with one JSON object per line."""

    reader = "producer_workers.datasets.open:open_jsonl"

    kind: Literal["jsonl"]
    """the kind of data set"""

    def count_held_out(self) -> int:
        try:
            with self.path.open("rb") as lines:
                return sum(1 for line in lines if line.strip())
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be opened: {error.strerror}",
                hint="see the task's dataset.path",
            ) from error


class ReasoningGymSection(DatasetKind):
    """[tasks.<name>.dataset] kind = "reasoning_gym": problems generated by that package."""

    reader = "producer_workers.datasets.open:open_generated"
    is_generated = True

    kind: Literal["reasoning_gym"]
    """the kind of data set"""
    name: str
    """the package's name of the task, for example chain_sum"""
    size: int = Field(10_000, ge=1, le=10_000_000)
    """problems in all, including those of the two splits below"""
    seed: int = Field(0, ge=0, lt=2**32)
    """seed of the problems"""
    config: dict[str, Any] = Field(default_factory=dict)
    """further options of that task, for example max_digits"""
    warm_start_size: Count = Field(0, ge=0)
    """problems reserved for the supervised warm start, never used for training or evaluation"""
    held_out_size: Count = Field(0, ge=0)
    """problems reserved for evaluation"""

    def problems(self) -> Iterator[str]:
        if self.warm_start_size + self.held_out_size >= self.size:
            yield (
                f"warm_start_size = {self.warm_start_size} and "
                f"held_out_size = {self.held_out_size} leave no problem of size = {self.size} "
                "to train on"
            )

    def count_held_out(self) -> int:
        return self.held_out_size


class ParquetSection(_Files):
    """[tasks.<name>.dataset] kind = "parquet": one row per problem, all in memory.

    Needs `pip install '.[parquet]'`.
    """

    reader = "producer_workers.datasets.open:open_parquet"

    kind: Literal["parquet"]
    """the kind of data set"""
    path: Path
    """the file, or a folder of *.parquet files, read in the order of their names"""


class HuggingFaceSection(_Files):
    """[tasks.<name>.dataset] kind = "hugging_face": a data set of the Hub, or saved by `datasets`.

    Needs `pip install '.[datasets]'`.
    """

    reader = "producer_workers.datasets.open:open_hugging_face"

    kind: Literal["hugging_face"]
    """the kind of data set"""
    path: Path
    """id of a data set on the Hub, for example openai/gsm8k, which is downloaded; or a folder
    that `save_to_disk` wrote
    """
    subset: str | None = None
    """subset of a data set on the Hub that has several, for example main"""
    split: str | None = None
    """the split to read, for example train, of a data set with several; of one on the Hub also a
    slice, for example test[:1000]
    """
    revision: str | None = None
    """branch, tag or commit of a data set on the Hub; default: the newest commit of main when the
    run starts for the first time. The run records the commit, and keeps it
    """

    def problems(self) -> Iterator[str]:
        """Yield settings of the Hub that a folder does not have."""
        for key in ("revision", "subset"):
            if getattr(self, key) and not is_id(self.path):
                yield f"{key} is for a data set on the Hub: {self.path} is none"

    @property
    def repository(self) -> Repository | None:
        """Return the repository of the data set on the Hub; None for a folder."""
        return repository(self.path, self.revision, "dataset")


class PythonSection(RecordsSection):
    """[tasks.<name>.dataset] kind = "python": an object of yours.

    For example a torch Dataset or DataLoader.
    """

    reader = "producer_workers.datasets.open:open_python"

    kind: Literal["python"]
    """the kind of data set"""
    factory: DottedPath
    """a function or class of yours as package.module:function that returns something with a length
    and [row], or something to iterate over
    """
    options: dict[str, Any] = Field(default_factory=dict)
    """arguments of the factory"""
    rows: Count | None = Field(None, ge=1)
    """records in one pass over an iterable without a length; default: unknown"""

    @property
    def code(self) -> dict[str, str]:
        """Return the factory, and the function that turns records into problems."""
        return {"data set": self.factory, **super().code}


DatasetSection = Annotated[
    DatasetKind,
    AttachedKinds(
        "rolloutmq.datasets",
        (JsonlSection, ParquetSection, HuggingFaceSection, PythonSection, ReasoningGymSection),
    ),
]
"""Any kind of data set: these, and those that packages attach. A kind names its `reader`."""
