"""The images of a group while it is worked on: its requests are known by its gid, so any agent loop is served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from buffer.rollout import MediaRef
from producer_workers.engines.base import Engine, GenerationError
from producer_workers.engines.capabilities import SeesImages
from producer_workers.images.image_reader import ImageReader


@contextmanager
def shown(engine: Engine, gid: str, media: Sequence[MediaRef]) -> Iterator[None]:
    """Meanwhile the requests of group `gid` see `media`. Raises GenerationError where the engine shows none."""
    if not media:
        yield
        return
    if not isinstance(engine, SeesImages):
        hint = "use [engine] kind vllm, or leave such tasks out of [worker] tasks"
        raise GenerationError(f"{gid} has images, and the engine {engine.name} can show none", hint=hint)
    engine.images.show(gid, media)
    try:
        yield
    finally:
        engine.images.forget(gid)


class Unseen:
    """The images of an engine without a model, which looks at no prompt either."""

    def read_with(self, reader: ImageReader) -> None:
        pass

    def show(self, gid: str, media: Sequence[MediaRef]) -> None:
        pass

    def forget(self, gid: str) -> None:
        pass
