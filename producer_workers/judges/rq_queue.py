"""The rq queue of a run's judges: its name, its server, and its serializer, which is never pickle.

`rq info` and rq's dashboards show it; its FailedJobRegistry holds what failed, with the traceback.
"""

from __future__ import annotations

from typing import Any

from rq import Queue
from rq.serializers import JSONSerializer

from buffer.errors import ConfigError
from buffer.server.nodes import Servers


def judge_url(configured: str | None, servers: Servers) -> str:
    """[judges] redis_url, else the run's server. ConfigError where that is a cluster: rq's keys have many slots."""
    if configured:
        return configured
    if servers.is_cluster:
        raise ConfigError(
            "judging of kind rq cannot use a cluster", hint="set [judges] redis_url to a single Redis or Valkey server"
        )
    return str(servers.masters()[0][0])


def open_queue(connection: Any, run: str, **options: Any) -> Queue:
    """The judge queue of a run. rq's default serializer is pickle: nothing may open this queue by another way."""
    return Queue(f"rmq-judge:{run}", connection=connection, serializer=JSONSerializer, **options)
