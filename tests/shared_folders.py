"""Which folders of tests run in one process of pytest-xdist, where files are spread over several."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

SHARED = ("tests/producer_workers/engines/", "tests/rolloutmq/web/")
"""Folders whose files share engines or a browser, which each process would start again."""


class SharedFolderScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Give all tests of a shared folder, or of another file, to the process that asks next."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((folder for folder in SHARED if file.startswith(folder)), file)
