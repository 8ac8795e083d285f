"""Which run it is: [run], [redis], [lease], [policy], [plan] and [launch].

Names and defaults are those of XTuner where the meaning is the same. Paths are relative to the
folder in which the command is started.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from buffer.config.section import YEAR_S, Count, Section
from buffer.errors import ConfigError
from buffer.limits import DAY_MS, Order
from buffer.redis.url import SCHEMES, mask_url
from buffer.weights.transport import TransportName
from buffer.weights.transports import check_url
from buffer.wire.staleness import stale_threshold


def check_name(name: str) -> str:
    """Return the name of a run or task, which becomes part of Redis keys and folder names.

    Raises ValueError for slashes, braces, colons and leading dots.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise ValueError(
            "expected letters, digits, `_ . -`; first a letter or digit; at most 64 characters"
        )
    return name


Name = Annotated[str, AfterValidator(check_name)]


class RunSection(Section):
    """[run]: the name, the folders and the seed of the run."""

    name: Name
    """name of the run: letters, digits, `_ . -`, at most 64; part of every Redis key"""
    dir: Path | None = None
    """folder of the run's server, checkpoints, weights and logs; default: `runs/<name>`"""
    columns: Path | None = None
    """folder that all processes see, for routed experts and sampling masks with more than 64 KiB
    per rollout; runs may share it; default: such columns travel through the server, too
    """
    umask: str = Field("0077", pattern="^0?0[0-7]{2}$")
    """what others may not do with the files of the run, in octal: all by default; "0027" lets the
    group read them, for workers of other users that load the weights from a folder
    """
    seed: int = Field(0, ge=0, lt=2**32)
    """seed of model, data order and sampling"""

    @property
    def folder(self) -> Path:
        """Return the folder of the run's server, checkpoints, weights and logs."""
        return self.dir or Path("runs") / self.name

    @property
    def mask(self) -> int:
        """Return `umask` as a number."""
        return int(self.umask, 8)

    def make_folder(self) -> Path:
        """Create the run's folder, or close one that is open to more users than `umask` permits."""
        self.folder.mkdir(parents=True, exist_ok=True)
        found = self.folder.stat()
        if found.st_mode & self.mask and found.st_uid == os.getuid():
            self.folder.chmod(stat.S_IMODE(found.st_mode) & ~self.mask)
        return self.folder


class RedisSection(Section):
    """[redis]: the server; without any URL, the run starts an embedded Valkey of its own."""

    url: str | None = Field(None, repr=False)
    """redis://, rediss://, redis+sentinel:// or unix:// URL; of a cluster, the URL of any node. The
    environment variable REDIS_URL replaces it, and the option --redis-url replaces both
    """
    deadline_s: float = Field(60.0, gt=0, le=YEAR_S)
    """time for which one operation is retried before it fails; trainer, producer and workers wait
    longer, until they are stopped
    """
    wait_replicas: int = Field(0, ge=0, le=64)
    """replicas that must have a submit, take or commit before it is acknowledged; what was
    acknowledged survives a failover
    """
    allow_unsafe: bool = False
    """start although the settings of the server could lose data"""

    @field_validator("url")
    @classmethod
    def _check_scheme(cls, url: str | None) -> str | None:
        if url is not None and urlsplit(url).scheme not in SCHEMES:
            raise ValueError(
                "expected a URL that starts with redis://, rediss://, unix:// or redis+sentinel://"
            )
        return url

    def resolve_url(self, flag: str | None = None) -> str | None:
        """Return `flag` (--redis-url), else REDIS_URL, else `url`; None for an embedded server."""
        return flag or os.environ.get("REDIS_URL") or self.url or None

    def __str__(self) -> str:
        return f"redis {mask_url(self.url) if self.url else '(embedded)'}"


class LeaseSection(Section):
    """[lease]: how long a silent worker keeps its groups, and how often a group is tried."""

    lease_ms: int = Field(10_000, ge=300, le=DAY_MS)
    """the groups of a worker that sent no heartbeat for this time are queued again"""
    heartbeat_ms: int = Field(2_000, ge=50, le=DAY_MS)
    """interval between two heartbeats; at most a third of lease_ms"""
    max_tries: int = Field(3, ge=1, le=1_000_000)
    """failed or lost tries after which a group becomes a dead letter; new tokens or turns that were
    stored begin the count anew
    """
    pause_timeout_s: float = Field(300.0, gt=0, le=YEAR_S)
    """a worker that does not confirm a pause within this time is fenced, and its groups are queued
    again
    """
    worker_timeout_ms: int = Field(
        default_factory=lambda data: min(3 * int(data.get("lease_ms", 10_000)), DAY_MS),
        ge=300,
        le=DAY_MS,
    )
    """a worker that sent no heartbeat for this time counts as gone; default: 3 * lease_ms"""

    def problems(self) -> Iterator[str]:
        """Yield a problem if the times do not fit together."""
        # two lost heartbeats must not cost a lease
        if self.heartbeat_ms * 3 > self.lease_ms:
            yield (
                f"heartbeat_ms = {self.heartbeat_ms} must be at most a third of "
                f"lease_ms = {self.lease_ms}, so that two lost heartbeats do not cost a lease"
            )


class PolicySection(Section):
    """[policy]: the model that is trained, and how old the weights of a rollout may be."""

    model: Path | None = None
    """model to start from: a Hugging Face folder, or the id of a model on the Hub, for example
    Qwen/Qwen3-0.6B, which is downloaded; default: the run builds a small model ([tiny_model])
    """
    revision: str | None = None
    """branch, tag or commit of a model on the Hub; default: the newest commit of main when the run
    starts for the first time. The run records the commit, and keeps it
    """
    weights_dir: Path | None = None
    """folder with a subfolder per run through which weights are shared; default: `weights` in the
    folder of the run
    """
    weights_transport: TransportName = "folder"
    """how weights reach the workers. folder: as files in that folder. redis: in chunks through the
    Redis server, for small models; needs memory on top of [memory].
    """
    delta_base_every: int = Field(1, ge=1, le=1000)
    """publish every n-th version whole, and those between as changes to the version before, where
    these are smaller: with bf16 and a learning rate of 1e-6, 1 to 3
    percent of the bytes. A worker that joins late, or missed versions, reads the changes since the
    newest whole version. Workers need room for two versions in their temporary folder (TMPDIR). 1:
    all are whole
    """
    sync_weights_interval: int = Field(1, ge=1, le=1_000_000)
    """train steps between two publications of weights"""
    max_staleness: int = Field(16, ge=0, le=1_000_000)
    """how many publications old the weights of a rollout may be, in tasks that set no max_staleness
    of their own; 0 is on-policy
    """
    max_ahead: int = Field(1, ge=0, le=1_000_000)
    """how many publications ahead of the trainer groups are started, at most max_staleness, in
    tasks that set no max_ahead of their own: the depth of the pipeline. A group that takes longer
    is still trained, up to max_staleness, so that long responses are not left out
    """
    max_token_staleness: int | None = Field(None, ge=0, le=1_000_000)
    """the same limit for single tokens, at most max_staleness: older tokens are not trained, and a
    group expires when one of its rollouts has no younger tokens; default: all tokens of a group are
    trained
    """
    order: Order = "staleness"
    """which completed groups are taken first: staleness (oldest weights), or fifo (arrival)"""
    pause_mode: Literal["abort", "drain", "keep"] = "keep"
    """what a weight update does to running rollouts. abort: they are interrupted and returned with
    their tokens. drain: they finish first. keep: they are frozen and continue with the new weights
    """

    @field_validator("max_token_staleness")
    @classmethod
    def _check_tokens(cls, tokens: int | None, info: ValidationInfo) -> int | None:
        groups = info.data.get("max_staleness", 0)
        if tokens is not None and tokens > groups:
            raise ValueError(
                f"expected at most max_staleness = {groups}: a group expires with its oldest token"
            )
        return tokens

    @property
    def stale_threshold(self) -> int:
        """Return the staleness, in train steps, from which a group is expired (I8)."""
        return stale_threshold(self.max_staleness, self.sync_weights_interval)

    @property
    def ahead_threshold(self) -> int:
        """Return the staleness, in train steps, of weights that start no group for a step."""
        return stale_threshold(self.max_ahead, self.sync_weights_interval)

    @property
    def token_threshold(self) -> int | None:
        """Return the staleness, in train steps, from which a token is not trained."""
        if self.max_token_staleness is None:
            return None
        return stale_threshold(self.max_token_staleness, self.sync_weights_interval)

    def weights_folder(self, run: RunSection) -> Path:
        """Return the folder through which `run` shares its weights."""
        # a subfolder per run, because each run deletes its own old versions
        return self.weights_dir / run.name if self.weights_dir else run.folder / "weights"


class WeightsSection(Section):
    """[weights]: a place for weights that trainer and workers reach without a shared folder."""

    url: str | None = None
    """s3://bucket/path, gs://bucket/path, az://container/path or file:///folder, with a subfolder
    per run (docs/pages/bucket.md); credentials come from the environment of each process, never
    from here. It replaces policy.weights_transport
    """

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None:
            try:
                check_url(url)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return url

    def url_of(self, run: RunSection) -> str | None:
        """Return the URL of a run, which deletes its own old versions alone."""
        return self.url and f"{self.url.rstrip('/')}/{run.name}"


class PlanSection(Section):
    """[plan]: how many train steps there are, and how large their batches are."""

    steps: Count = Field(100, ge=1)
    """train steps in all"""
    batch_size: int = Field(16, ge=1, le=1024)
    """groups per train step, over all training tasks"""
