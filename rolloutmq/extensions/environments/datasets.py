"""[tasks.<name>.dataset] of the kinds harbor, verifiers, openenv and nemo_gym."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from buffer.config.section import Count
from producer_workers.config.dataset import DatasetKind, RecordsSection, StoredSection


class HarborSection(StoredSection):
    """[tasks.<name>.dataset] kind = "harbor": a folder of tasks of Harbor: agent_loop is harbor."""

    reader = "rolloutmq.extensions.environments.rows:open_tasks"
    agent_loop = "harbor"

    kind: Literal["harbor"]
    """the kind of data set"""
    path: Path
    """the folder, which rollout workers read by the same path"""


class VerifiersSection(RecordsSection):
    """[tasks.<name>.dataset] kind = "verifiers": the tasks of an environment of `verifiers` 0.4.

    Needs `pip install 'verifiers>=0.4,<0.5'`. Its agents play the tasks: agent_loop is verifiers.
    """

    reader = "rolloutmq.extensions.environments.rows:open_verifiers"
    agent_loop = "verifiers"
    loop_keys = ("environment", "options")
    package = "verifiers"

    kind: Literal["verifiers"]
    """the kind of data set"""
    environment: str = Field(min_length=1)
    """id of a taskset, its own (harbor, nemo_gym, openenv, textarena) or of a package that you
    installed; with an environment before it, for example best-of-n+gsm8k-v1
    """
    options: dict[str, Any] = Field(default_factory=dict)
    """keys of the table [env] of verifiers, for example
    { agent = { harness = { id = "null" }, runtime = { type = "docker" } } }
    """
    size: Count | None = Field(None, ge=1)
    """read this many tasks; needed for a taskset without an end; default: all"""


class OpenEnvSection(DatasetKind):
    """[tasks.<name>.dataset] kind = "openenv": numbered episodes of an environment of OpenEnv 0.10.

    Each row is one call of its `reset`. agent_loop is openenv, which needs
    `pip install 'openenv>=0.10,<0.11'`.
    """

    reader = "rolloutmq.extensions.environments.rows:open_resets"
    agent_loop = "openenv"
    loop_keys = ("url",)

    kind: Literal["openenv"]
    """the kind of data set"""
    url: str = Field(pattern=r"^(https?|wss?)://")
    """address of the environment's server, which rollout workers reach"""
    size: Count = Field(ge=1)
    """number of episodes"""
    first: Count = Field(0, ge=0)
    """number of the first episode, so that tasks can share an environment but no episode"""
    numbered_by: str = "seed"
    """argument of `reset` that gets the number: seed, or index for an environment with tasks"""
    reset: dict[str, Any] = Field(default_factory=dict)
    """further arguments of `reset`, the same for all, for example { split = "train" }"""


class NemoGymSection(StoredSection):
    """[tasks.<name>.dataset] kind = "nemo_gym": JSON lines with the rows of an agent of NeMo Gym.

    agent_loop is nemo_gym, which needs `pip install '.[http]'`.
    """

    reader = "rolloutmq.extensions.environments.rows:open_rows"
    agent_loop = "nemo_gym"
    loop_keys = ("url",)

    kind: Literal["nemo_gym"]
    """the kind of data set"""
    url: str = Field(pattern=r"^https?://")
    """address of the agent's server, which rollout workers reach, without /run"""
