"""Run rq workers that judge, with a forked work-horse for each job, so that a judge harms only it.

The queue of a run carries plain JSON, never pickle; a job that is not JSON, or names a judge that
is not in the worker's config, fails. `rq info rmq-judge:RUN` shows the queue; its FailedJobRegistry
holds the tracebacks.
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
import zlib
from collections import deque
from collections.abc import Mapping
from contextlib import closing
from math import ceil
from typing import Any, ClassVar

import redis
from rq import Queue, Worker
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.utils import as_text, now
from rq.worker_registration import WORKERS_BY_QUEUE_KEY, get_keys

from buffer.errors import ConfigError, JudgeError, RolloutMQError, Skip, describe
from buffer.failure_text import message_of
from buffer.redis.keys import Keys
from buffer.redis.retry import is_transient
from buffer.redis.store import Store
from buffer.redis.url import Servers, open_client
from producer_workers.config.task import JudgingSection
from producer_workers.follow_owner import OWNER, follow_owner
from producer_workers.judges.judge import columns_of, rollout_of
from producer_workers.judges.load import load_judge
from producer_workers.user_code.failure import failure_text
from producer_workers.user_code.function_server import limit_memory, lower

log = logging.getLogger("rolloutmq.judge")

FUNCTION = "producer_workers.judges.rq_worker.score"  # for rq's tools: no worker looks it up

FIELDS = {
    "created_at", "data", "description", "ended_at", "enqueued_at", "failure_ttl", "last_heartbeat",
    "origin", "result_ttl", "started_at", "status", "timeout", "worker_name",
}  # fmt: skip
"""What the hash of a job may have: times, limits and texts, but nothing that rq looks up."""

LONGEST_JOB = 1 << 28  # bytes, unpacked
WORKER_TTL_S = 60  # how long a worker that died is still listed; a live one reports more often
CLEAN_S = 60  # seconds between two searches of rq for jobs whose worker died
PACE_S = 1.0  # between two looks for workers that died
MOST_DEATHS = 8  # of judge workers, within DEATHS_S: then the pool ends, too
DEATHS_S = 60.0
LOST_SERVER = 3  # exit code of a worker whose server went away; its successor waits for the server


def judge_url(configured: str | None, servers: Servers) -> str:
    """Return [judges] redis_url, else the run's server. Raises ConfigError for a cluster."""
    if configured:
        return configured
    if servers.is_cluster:
        raise ConfigError(
            "judging of kind rq cannot use a cluster",
            hint="set [judges] redis_url to a single Redis or Valkey server",
        )
    return str(servers.masters()[0][0])


class JudgeQueue(Queue):
    """The judge queue of one run, whose keys all carry the names of `Keys`, as the ACL expects."""

    # rq's own list is shared by all applications of a server
    redis_queues_keys = property(lambda self: f"rq:queues:{self.name}")


def open_queue(connection: Any, run: str, **options: Any) -> JudgeQueue:
    """Open the judge queue of a run; opened otherwise, rq would use pickle."""
    name = Keys(run).judge_queue
    return JudgeQueue(name, connection=connection, serializer=JSONSerializer, **options)


def score(
    judge: str, rollouts: list[dict[str, Any]], timeout_s: float, memory_mb: int
) -> list[dict[str, Any]] | dict[str, str]:
    """Return what `judge` gives one rollout, or a group, within limits. Raises JudgeError.

    {"skip": reason}: it skips the group.
    """
    if judge not in JudgeJob.judges:
        raise JudgeError(
            f"this worker does not run {judge!r:.80}",
            hint="start the judge workers with the config of the run",
        )
    chosen = load_judge(judge, JudgingSection(sandbox=JudgeJob.judges[judge]))
    # After the imports, which are not the judge's. These limits also end a loop in C;
    # rq's own limit is a signal to Python.
    limit_memory(memory_mb)
    used = resource.getrusage(resource.RUSAGE_SELF)
    lower(resource.RLIMIT_CPU, ceil(used.ru_utime + used.ru_stime + timeout_s) + 1)
    states = [rollout_of(fields) for fields in rollouts]
    try:
        rewards = asyncio.run(chosen.judge_group(states))
    except Skip as error:
        return {"skip": error.message}
    except JudgeError as error:  # its text, with the user's traceback, is all that rq hands on
        raise JudgeError(failure_text(error)) from None
    return [columns_of(state) | reward for state, reward in zip(states, rewards, strict=True)]


class JudgeJob(Job):
    """A job that can only call `score`, whatever its hash in Redis says.

    rq would import functions that a hash names (its own, and callbacks), open URLs (webhooks), and
    start other jobs (dependents, retries, repeats). So rq gets no hash with a field that our jobs
    do not have, and the function is not looked up.
    """

    judges: ClassVar[Mapping[str, str]] = {}  # the sandbox of each judge that this worker runs

    func = property(lambda _: score)

    def refresh(self) -> None:
        """Read a job. Raises NoSuchJobError, for which rq drops it, if it is none of ours."""
        try:
            super().refresh()  # type: ignore[no-untyped-call]
        except redis.ResponseError as error:  # of another run, or no hash
            raise NoSuchJobError(f"{self.id!r:.80} is no job of this run") from error

    def restore(self, raw_data: Mapping[bytes, bytes]) -> None:
        """Read a job from its hash. Raises NoSuchJobError."""
        try:
            foreign = {name.decode() for name, value in raw_data.items() if value} - FIELDS
            if foreign:
                raise ValueError(f"jobs of judges have no {', '.join(sorted(foreign))}")
            data = zlib.decompressobj().decompress(raw_data[b"data"], LONGEST_JOB + 1)
            if len(data) > LONGEST_JOB:
                raise ValueError(f"it has more than {LONGEST_JOB} bytes")
            super().restore({**raw_data, b"data": data})
        except Exception as error:  # rq's worker would end, and meet the job again after its start
            log.warning("refused the job %r: %s", self.id[:80], describe(error))
            raise NoSuchJobError(f"{self.id!r:.80} is no job of a judge") from error


class JudgeWorker(Worker):
    """Forks a work-horse per job. Touches none of the keys that rq's applications share."""

    queue_class = JudgeQueue

    # the list of the workers of its queue, in place of that of all workers
    redis_workers_keys = property(lambda self: WORKERS_BY_QUEUE_KEY % self.queues[0].name)

    def _set_ip_address(self, connection: Any) -> None:
        """Skip the address: rq would list all clients of the server."""
        self.ip_address = "unknown"

    def check_for_suspension(self, burst: bool) -> None:
        """Do nothing: `rq suspend` is for all applications of a server."""

    def run_maintenance_tasks(self) -> None:
        """Clean what our jobs use. rq also cleans what all applications of a server share."""
        (queue,) = self.queues
        if queue.acquire_maintenance_lock():
            try:
                for kind in (FinishedJobRegistry, FailedJobRegistry, StartedJobRegistry):
                    kind(queue=queue).cleanup()
                queue.intermediate_queue.cleanup(self, queue)
                dead = [key for key in get_keys(queue) if not self.connection.exists(key)]
                if dead:
                    self.connection.srem(self.redis_workers_keys, *dead)
            except (ValueError, redis.ResponseError) as error:
                log.warning("rq's lists hold what is no job of ours: %s", describe(error))
            queue.release_maintenance_lock()  # type: ignore[no-untyped-call]
        self.last_cleaned_at = now()  # type: ignore[assignment]

    def handle_exception(self, job: Job, *exc_info: Any) -> None:
        """Log the error in one line: rq's own method logs the whole rollout."""
        log.warning("job %s failed: %s", job.id, message_of(failure_text(exc_info[1])))


def serve_judges(url: str, run: str, judges: Mapping[str, str], count: int) -> None:
    """Run `count` rq workers as processes, and restart them when they die.

    `judges`: those they may run, each with its sandbox. SIGTERM or Ctrl-C ends this once the
    workers have finished their jobs. Raises RolloutMQError if they always die.
    """
    for judge, sandbox in judges.items():
        # before the first fork, so that no work-horse imports it again
        load_judge(judge, JudgingSection(sandbox=sandbox))
    JudgeJob.judges = judges
    os.environ[OWNER] = str(os.getpid())  # a worker does not outlive this process
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    signal.signal(signal.SIGINT, signal.getsignal(signal.SIGTERM))

    host = socket.gethostname().split(".")[0]

    def start(before: str = "") -> multiprocessing.process.BaseProcess:
        name = f"{Keys(run).judge_queue}:{host}-{os.getpid()}-{secrets.token_hex(3)}"
        worker = multiprocessing.get_context("fork").Process(
            target=_work, name=name, args=(url, run, name, before, signals)
        )
        worker.start()
        return worker

    workers = [start() for _ in range(count)]
    log.info("%d judge workers for %s", count, ", ".join(sorted(judges)))
    deaths = deque[float](maxlen=MOST_DEATHS)
    try:
        while not signals:
            time.sleep(PACE_S)
            for slot, worker in enumerate(workers):
                if worker.is_alive() or signals:
                    continue
                log.warning("restarting a judge worker that exited with %s", worker.exitcode)
                lost_server = worker.exitcode == LOST_SERVER
                if not lost_server:
                    deaths.append(time.monotonic())
                if len(deaths) == MOST_DEATHS and deaths[-1] - deaths[0] < DEATHS_S:
                    raise RolloutMQError(
                        f"{MOST_DEATHS} judge workers ended within {DEATHS_S:g} s",
                        hint="the log above says why",
                    )
                # another death may be the work of the job, which then counts as a try
                workers[slot] = start(worker.name if lost_server else "")
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()


def _give_back(queue: JudgeQueue, worker: str) -> None:
    """Queue the job again that `worker` was running when it lost the server."""
    record = Worker.redis_worker_namespace_prefix + worker
    job_id = queue.connection.hget(record, "current_job")
    job = queue.fetch_job(as_text(job_id)) if job_id else None
    if job and job.is_started:
        queue.started_job_registry.remove_executions(job)
        queue.enqueue_job(job, at_front=True)
    queue.connection.delete(record)


def _work(url: str, run: str, name: str, before: str, signals: list[int]) -> None:
    os.setpgrp()  # so that Ctrl-C reaches the pool alone, which stops its workers in order
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if signals:  # stopped between the fork and the lines above
        return
    follow_owner()
    try:
        with closing(Store(url, name="rolloutmq-judge-start")) as store:
            store.patience = lambda: True
            store.retrying("first contact", lambda: store.client.ping())
        connection = open_client(url, name="rolloutmq-judge")
        queue = open_queue(connection, run, job_class=JudgeJob)
        if before:
            _give_back(queue, before)
        JudgeWorker(
            [queue],
            name=name,
            connection=connection,
            job_class=JudgeJob,
            serializer=JSONSerializer,
            worker_ttl=WORKER_TTL_S,
            maintenance_interval=CLEAN_S,
        ).work(logging_level="WARNING")
    except redis.RedisError as error:  # the worker ends when its server does
        if not is_transient(error):
            raise
        log.warning("a judge worker lost the server: %s", error)
        sys.exit(LOST_SERVER)
