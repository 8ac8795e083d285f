"""Tests of servers, each on Valkey and on Redis."""

from __future__ import annotations

from tests.servers import server

__all__ = ["server"]
