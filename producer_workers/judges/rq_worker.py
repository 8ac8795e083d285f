"""rq workers for judging: each forks a work-horse per rollout, so that a judge can only spoil its
own process.

A worker runs the judges of its own config and nothing else, whatever a job in Redis names. A job
that is not JSON, pickle above all, is never decoded: it fails, and stays in the failed registry.

What an rq job of a judge holds, and what its work-horse does with it.

The dotted path of `score` is stored in Redis: it is part of the wire format. Everything in a job is
plain JSON.

The rq queue of a run's judges: its name, its server, and its serializer, which is never pickle.

`rq info` and rq's dashboards show it; its FailedJobRegistry holds what failed, with the traceback.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Collection
from math import ceil
from typing import Any, ClassVar

import redis
from rq import Queue, Worker
from rq.job import Job
from rq.serializers import JSONSerializer

from buffer.errors import ConfigError, JudgeError
from buffer.model.rollout import RolloutState
from buffer.server.process import OWNER, follow_owner
from buffer.store.nodes import Servers
from buffer.store.store import Store
from buffer.store.url import open_client
from producer_workers.judges.judge import judge_all
from producer_workers.judges.load import load_judge

log = logging.getLogger("rolloutmq.judge")
FUNCTION = "producer_workers.judges.rq_worker.score"
_CPU_GRACE_S = 1
WORKER_TTL_S = 60
"""How long a worker that is gone is still shown; it says that it is alive more often."""
CLEAN_S = 60
"""Time between two sweeps of rq for jobs whose worker died."""
LOOK_S = 0.2
RESTART_S = 1.0
LOST_SERVER = 3
"""Exit code of a worker whose server went away: the next one waits for it."""


def judge_url(configured: str | None, servers: Servers) -> str:
    """[judges] redis_url, else the run's server. ConfigError where that is a cluster: rq's keys
    have many slots.
    """
    if configured:
        return configured
    if servers.is_cluster:
        raise ConfigError(
            "judging of kind rq cannot use a cluster",
            hint="set [judges] redis_url to a single Redis or Valkey server",
        )
    return str(servers.masters()[0][0])


def open_queue(connection: Any, run: str, **options: Any) -> Queue:
    """The judge queue of a run. rq's default serializer is pickle: nothing may open this queue by
    another way.
    """
    return Queue(f"rmq-judge:{run}", connection=connection, serializer=JSONSerializer, **options)


def score(
    judge: str, rollouts: list[dict[str, Any]], timeout_s: float, memory_mb: int
) -> list[dict[str, float]]:
    """The rewards that `judge` gives one rollout, or a group, in a process that may be spoilt.
    Raises JudgeError.
    """
    chosen = load_judge(judge)
    _limit(timeout_s, memory_mb)
    return asyncio.run(judge_all(chosen, [RolloutState(**fields) for fields in rollouts]))


def _limit(timeout_s: float, memory_mb: int) -> None:
    """rq's own time limit is a signal that Python must get to handle. The kernel's ends a loop in
    C, too.
    """
    _lower(resource.RLIMIT_AS, memory_mb * 2**20)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, ceil(used.ru_utime + used.ru_stime + timeout_s) + _CPU_GRACE_S)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (most, most))


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
        self._url = url
        self._run = run
        self._judges = judges
        self._count = workers
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
                    log.warning(
                        "a judge worker ended with exit code %s; starting another", worker.exitcode
                    )
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
