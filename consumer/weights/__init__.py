"""Weights on their way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from buffer.rollout import PolicyVersion

if TYPE_CHECKING:
    from buffer.run import Run
    from consumer.config import TrainingConfig


class WeightsTransport(Protocol):
    """How versions of weights reach the workers."""

    def write(self, weights: PolicyVersion, save: Callable[[Path], None]) -> tuple[str, str]:
        """Store what `save(folder)` writes. Returns (path or address, checksum) for `publish_weights`."""

    def prune(self) -> None:
        """Delete old versions. Called after a publication."""

    def clear(self) -> None:
        """Delete what a trainer left that was killed while it wrote."""

    def close(self) -> None:
        """Nothing more will be published."""


def open_transport(config: TrainingConfig, run: Run) -> WeightsTransport:
    """The transport of `[policy] weights_transport`."""
    from consumer.weights.redis_chunks import RedisChunks
    from consumer.weights.shared_folder import SharedFolder
    from consumer.weights.transfer import WeightTransfer

    keep, transport = config.trainer.keep_weights, config.policy.weights_transport
    if transport == "redis":
        return RedisChunks(run, keep=keep)
    folder = SharedFolder(config.policy.weights_folder(config.run), keep=keep)
    if transport == "folder":
        return folder
    return WeightTransfer(run, folder, transport, host=config.policy.weights_host, keep=keep)
