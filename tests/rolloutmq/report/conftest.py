"""The browser of the tests of the web view."""

from __future__ import annotations

from tests.rolloutmq.web.conftest import chromium

__all__ = ["chromium"]
