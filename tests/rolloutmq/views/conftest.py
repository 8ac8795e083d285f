"""The populated run of the command's tests, on a real server."""

from __future__ import annotations

from tests.rolloutmq.conftest import command, scene, server, store

__all__ = ["command", "scene", "server", "store"]
