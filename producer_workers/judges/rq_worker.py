"""rq workers for judging: each forks a work-horse per rollout, so that a judge can only spoil its own process.

A worker runs the judges of its own config and nothing else, whatever a job in Redis names. A job that is not JSON,
pickle above all, is never decoded: it fails, and stays in the failed registry.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Collection
from typing import Any, ClassVar

import redis
from rq import Worker
from rq.job import Job
from rq.serializers import JSONSerializer

from buffer.errors import JudgeError
from buffer.server.lifeline import OWNER, follow_owner
from buffer.server.url import open_client
from buffer.store import Store
from producer_workers.judges.load import load_judge
from producer_workers.judges.rq_job import FUNCTION
from producer_workers.judges.rq_queue import open_queue

log = logging.getLogger("rolloutmq.judge")

WORKER_TTL_S = 60
"""How long a worker that is gone is still shown; it says that it is alive more often."""

CLEAN_S = 60
"""Time between two sweeps of rq for jobs whose worker died."""

LOOK_S = 0.2
RESTART_S = 1.0

LOST_SERVER = 3
"""Exit code of a worker whose server went away: the next one waits for it."""


class JudgeJob(Job):
    """A job that may only call `score`, with a judge that this worker knows."""

    judges: ClassVar[frozenset[str]] = frozenset()

    def perform(self) -> Any:
        """Raises JudgeError for any other function, DeserializationError for anything but JSON."""
        if self.func_name != FUNCTION or not self.args or self.args[0] not in self.judges:
            raise JudgeError(
                f"this worker does not run {self.func_name!r} {self.args[:1]!r:.80}",
                hint="start it with the config of the run",
            )
        return super().perform()


class JudgeWorker(Worker):
    """Forks a work-horse per job."""

    def handle_exception(self, job: Job, *exc_info: Any) -> None:
        """rq's own writes the whole rollout to the log; the traceback is in the failed registry."""
        log.warning("job %s failed: %r", job.id, exc_info[1])


class JudgePool:
    """So many rq workers as processes, started again when they die. `judges`: what they may run."""

    def __init__(self, url: str, run: str, judges: Collection[str], workers: int) -> None:
        self._url, self._run, self._judges, self._count = url, run, judges, workers
        self._stopping = False

    def run(self) -> None:
        """Until SIGTERM or Ctrl-C; then waits until its workers have finished what they judge."""
        for judge in self._judges:
            load_judge(judge)  # once, before the first fork: a work-horse need not import it again
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        workers = [self._start() for _ in range(self._count)]
        log.info("%d judge workers for %s", self._count, ", ".join(sorted(self._judges)))
        while not self._stopping:
            time.sleep(LOOK_S)
            for place, worker in enumerate(workers):
                if not worker.is_alive() and not self._stopping:
                    log.warning("a judge worker ended with exit code %s; starting another", worker.exitcode)
                    time.sleep(RESTART_S)
                    workers[place] = self._start()
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _start(self) -> multiprocessing.process.BaseProcess:
        os.environ[OWNER] = str(os.getpid())  # a worker does not outlive this process
        worker = multiprocessing.get_context("fork").Process(target=self._work)
        worker.start()
        return worker

    def _work(self) -> None:
        os.setpgrp()  # Ctrl-C reaches the pool alone, which stops all in order
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if self._stopping:  # told before it could be a worker
            return
        follow_owner()
        JudgeJob.judges = frozenset(self._judges)
        try:
            self._serve()
        except redis.RedisError as error:
            log.warning("a judge worker lost the server: %s", error)
            sys.exit(LOST_SERVER)

    def _serve(self) -> None:
        """One rq worker, which ends when its server does; so the server is waited for here."""
        store = Store(self._url, name="rolloutmq-judge-start")
        store.patience = lambda: True
        store.retrying("first contact", lambda: store.control.ping())
        store.close()
        connection = open_client(self._url, name="rolloutmq-judge")
        name = f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{secrets.token_hex(3)}"
        JudgeWorker(
            [open_queue(connection, self._run, job_class=JudgeJob)],
            name=name,
            connection=connection,
            job_class=JudgeJob,
            serializer=JSONSerializer,
            worker_ttl=WORKER_TTL_S,
            maintenance_interval=CLEAN_S,
        ).work(logging_level="WARNING")
