"""The populated run of the command's tests, on a real server."""

from __future__ import annotations

from tests.rolloutmq.conftest import scene, server, store

__all__ = ["scene", "server", "store"]
