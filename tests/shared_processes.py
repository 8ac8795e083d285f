"""Which files of tests run in one process of pytest-xdist, where files are spread over several."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

SHARED = {
    "vLLM": ("tests/producer_workers/engines/", "tests/pipeline/test_engine_restarts.py"),
    "Chromium": ("tests/rolloutmq/web/",),
    # all that asks tests/warm_process.py for many processes
    "forks": (
        "tests/pipeline/test_run_command.py",
        "tests/pipeline/test_trainer_ranks.py",
        "tests/pipeline/test_own_parts.py",
        "tests/pipeline/test_roles_over_tls.py",
        "tests/pipeline/test_signed_run.py",
        "tests/pipeline/test_hang_up.py",
        "tests/pipeline/test_producer.py",
        "tests/pipeline/test_disaggregated.py",
        "tests/pipeline/test_tracing.py",
        "tests/consumer/handle/test_ranks.py",
        "tests/examples/",
        "tests/docs/test_readme.py",
        "tests/rolloutmq/launch/test_gpu_check.py",
        "tests/truth/test_truth.py",
    ),
}
"""Files that share what each process would have to start again: engines, a browser, imports."""


class SharedProcessScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Give files that share something, or one other file, to the process that is free next."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((name for name, files in SHARED.items() if file.startswith(files)), file)
