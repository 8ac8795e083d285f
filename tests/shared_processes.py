"""Which files of tests run in one process of pytest-xdist, where files are spread over several."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[1]
SHARED = {
    "vLLM": ("tests/producer_workers/engines/", "tests/pipeline/test_engine_restarts.py"),
    "Chromium": ("tests/rolloutmq/web/",),
    # the kernel's kills are counted for the whole machine
    "forks": ("proofs/truth/test_truth.py", "tests/rolloutmq/launch/"),
}
"""Files that share what each process would have to start again: engines, a browser, imports."""

FORKS = ("warm_process", "make_site")
"""Words of files whose processes are forked from a warm one, by tests/warm_process.py."""


@cache
def group_of(file: str) -> str:
    for name, files in SHARED.items():
        if file.startswith(files):
            return name
    text = (ROOT / file).read_text(encoding="utf-8")
    return "forks" if any(word in text for word in FORKS) else file


class SharedProcessScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Give files that share something, or one other file, to the process that is free next."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(super()._split_scope(nodeid))
