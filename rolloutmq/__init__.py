"""The public names of the project: import them from here, and from nowhere else.

    from rolloutmq import RolloutConsumer, Run, Store

`import rolloutmq` loads no torch, vllm, transformers or rq: the three names that need torch are
loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# First: it finds the packages below, also beside a file of yours that has the name of one.
from rolloutmq import own_packages as own_packages

# isort: split
from buffer.batches.position import Position
from buffer.control.control import Mode
from buffer.errors import ConfigError, RolloutMQError
from buffer.model.limits import RunLimits, TaskLimits
from buffer.model.manifest import Manifest, NotReady
from buffer.replay_buffer import ReplayBuffer
from buffer.rollouts.group import RolloutGroup
from buffer.rollouts.rollout import (
    MediaRef,
    PolicyVersion,
    RolloutState,
    Status,
    ToolCall,
    VersionSpan,
)
from buffer.rollouts.sampling import SampleParams
from buffer.run import Run
from buffer.server.embedded import EmbeddedServer
from buffer.store.store import Store
from buffer.weights.shared_folder import FolderSender
from consumer.async_consumer import AsyncRolloutConsumer
from consumer.batches.batch import Batch
from consumer.publication import publish
from consumer.rollout_consumer import RolloutConsumer
from consumer.training.checkpoint import CheckpointFolder
from producer_workers.agent_loops.agent_loop import AgentLoop
from producer_workers.agent_loops.multi_turn import Answer, Environment, MultiTurnAgentLoop
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop, run_all
from producer_workers.datasets.dataset import Dataset
from producer_workers.engines.base import Engine
from producer_workers.judges.judge import GroupJudge, Judge
from producer_workers.producer.producer import AgentLoopManager
from producer_workers.user_code.cheap import cheap
from producer_workers.worker.worker import Worker
from rolloutmq.testing import RehearsalError, rehearse

if TYPE_CHECKING:
    from consumer.batches.torch_dataset import BatchDataset, padded_tensors
    from consumer.sharded_consumer import ShardedConsumer
else:
    _NEEDS_TORCH = {
        "BatchDataset": "consumer.batches.torch_dataset",
        "ShardedConsumer": "consumer.sharded_consumer",
        "padded_tensors": "consumer.batches.torch_dataset",
    }

    # Type checkers must not see it: they would accept any name.
    def __getattr__(name: str) -> Any:
        """Load a name that needs torch."""
        if name not in _NEEDS_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_NEEDS_TORCH[name]), name)


__all__ = [
    "AgentLoop",
    "AgentLoopManager",
    "Answer",
    "AsyncRolloutConsumer",
    "Batch",
    "BatchDataset",
    "CheckpointFolder",
    "ConfigError",
    "Dataset",
    "EmbeddedServer",
    "Engine",
    "Environment",
    "FolderSender",
    "GroupJudge",
    "Judge",
    "Manifest",
    "MediaRef",
    "Mode",
    "MultiTurnAgentLoop",
    "NotReady",
    "PolicyVersion",
    "Position",
    "RehearsalError",
    "ReplayBuffer",
    "RolloutConsumer",
    "RolloutGroup",
    "RolloutMQError",
    "RolloutState",
    "Run",
    "RunLimits",
    "SampleParams",
    "ShardedConsumer",
    "SingleTurnAgentLoop",
    "Status",
    "Store",
    "TaskLimits",
    "ToolCall",
    "VersionSpan",
    "Worker",
    "cheap",
    "padded_tensors",
    "publish",
    "rehearse",
    "run_all",
]
