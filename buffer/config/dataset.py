"""[tasks.<name>.dataset]: where the prompts of a task come from, one section per kind of data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from buffer.config.loader import Section
from buffer.model.byte_size import ByteSize
from buffer.model.dotted_path import is_dotted_path


class ImagesSection(Section):
    """[tasks.<name>.dataset.images]: rows may name images, which are shown to the model; [run]
    media keeps them.
    """

    root: Path | None = None
    """folder in which the files of images lie, and which no row may leave; default: that of the
    data set's file
    """
    max_bytes: ByteSize = 20 << 20
    """a larger file is refused"""
    max_pixels: int = Field(1 << 24, ge=1)
    """so is an image with more pixels, before it is unpacked"""
    max_images: int = Field(8, ge=1)
    """and a row with more images"""


class _Records(Section):
    """A data set whose rows are records of somebody else's making."""

    record: str | None = None
    """your function that makes a problem of one record (a dict), as package.module:function;
    default: the fields that JSONL files have
    """
    images: ImagesSection | None = None
    """what images rows may name; default: none"""

    @field_validator("record")
    @classmethod
    def _check_record(cls, record: str | None) -> str | None:
        if record is not None and not is_dotted_path(record):
            raise ValueError("expected package.module:function")
        return record


class JsonlDataset(_Records):
    """[tasks.<name>.dataset] kind = "jsonl": one JSON object per line."""

    kind: Literal["jsonl"]
    """which kind of data set"""
    path: Path
    """the file"""


class ReasoningGymDataset(Section):
    """[tasks.<name>.dataset] kind = "reasoning_gym": problems that package generates from a seed."""

    kind: Literal["reasoning_gym"]
    """which kind of data set"""
    name: str
    """the package's name of the task, for example chain_sum"""
    size: int = Field(10_000, ge=1)
    """problems in all, those of the two splits below included"""
    seed: int = Field(0, ge=0)
    """seed of the problems"""
    config: dict[str, Any] = Field(default_factory=dict)
    """further options of that task, for example max_digits"""
    warm_start_size: int = Field(0, ge=0)
    """problems set aside for the supervised warm start; none of them is used for training or
    evaluation
    """
    held_out_size: int = Field(0, ge=0)
    """problems set aside for evaluation"""

    @model_validator(mode="after")
    def _check_split(self) -> ReasoningGymDataset:
        if self.warm_start_size + self.held_out_size >= self.size:
            raise ValueError(
                f"warm_start_size = {self.warm_start_size} and held_out_size = {self.held_out_size} "
                f"leave no problem of size = {self.size} to train on"
            )
        return self


class ParquetDataset(_Records):
    """[tasks.<name>.dataset] kind = "parquet": one row per problem (`pip install
    'rolloutmq[parquet]'`).
    """

    kind: Literal["parquet"]
    """which kind of data set"""
    path: Path
    """the file, or a folder of *.parquet files, read in the order of their names"""


class HuggingFaceDataset(_Records):
    """[tasks.<name>.dataset] kind = "hugging_face": a folder saved by `datasets`.

    Needs `pip install 'rolloutmq[datasets]'`.
    """

    kind: Literal["hugging_face"]
    """which kind of data set"""
    path: Path
    """the folder that `save_to_disk` wrote"""
    split: str | None = None
    """which part of a folder that has several, for example train"""


class PythonDataset(_Records):
    """[tasks.<name>.dataset] kind = "python": an object of yours, for example a torch Dataset or
    DataLoader.
    """

    kind: Literal["python"]
    """which kind of data set"""
    factory: str
    """your function or class that makes it, as package.module:function: something with a length and
    [row], or something to iterate over
    """
    options: dict[str, Any] = Field(default_factory=dict)
    """what the factory is called with"""
    rows: int | None = Field(None, ge=1)
    """records in one pass over something that can only be iterated over, where it has no length"""

    @field_validator("factory")
    @classmethod
    def _check_factory(cls, factory: str) -> str:
        if not is_dotted_path(factory):
            raise ValueError("expected package.module:function")
        return factory


DatasetSection = Annotated[
    JsonlDataset | ParquetDataset | HuggingFaceDataset | PythonDataset | ReasoningGymDataset,
    Field(discriminator="kind"),
]
