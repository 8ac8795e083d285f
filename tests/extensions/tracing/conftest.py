"""The sites of whole runs."""

from tests.pipeline.conftest import *  # noqa: F403
