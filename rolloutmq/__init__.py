"""The public names of the project: import them from here, and from nowhere else.

    from rolloutmq import RolloutConsumer, Run, Store

Each name is loaded when it is first used, so that the command starts at once, and no torch, vllm,
transformers or rq is loaded for those that do not need it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# First: it finds the packages below, also beside a file of yours that has the name of one.
from rolloutmq import own_packages as own_packages

# isort: split

if TYPE_CHECKING:
    from buffer.control.control import Mode
    from buffer.errors import ConfigError, RolloutMQError
    from buffer.ledger.position import Position
    from buffer.model.limits import RunLimits, TaskLimits
    from buffer.model.manifest import Manifest, NotReady
    from buffer.redis.server.embedded import EmbeddedServer
    from buffer.redis.store import Store
    from buffer.replay_buffer import ReplayBuffer
    from buffer.run import Run
    from buffer.weights.shared_folder import FolderSender
    from buffer.wire.group import RolloutGroup
    from buffer.wire.rollout import (
        MediaRef,
        PolicyVersion,
        RolloutState,
        Status,
        ToolCall,
        VersionSpan,
    )
    from buffer.wire.sampling import SampleParams
    from consumer.async_consumer import AsyncRolloutConsumer
    from consumer.batches.batch import Batch
    from consumer.batches.torch_dataset import BatchDataset, padded_tensors
    from consumer.publication import publish
    from consumer.rollout_consumer import RolloutConsumer
    from consumer.sharded_consumer import ShardedConsumer
    from consumer.training.checkpoint import CheckpointFolder
    from producer_workers.agent_loops.agent_loop import AgentLoop
    from producer_workers.agent_loops.environment import Answer, Environment
    from producer_workers.agent_loops.multi_turn import MultiTurnAgentLoop
    from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop, run_all
    from producer_workers.datasets.dataset import Dataset
    from producer_workers.engines.base import Engine
    from producer_workers.judges.judge import GroupJudge, Judge
    from producer_workers.producer.producer import AgentLoopManager
    from producer_workers.user_code.runs_inline import runs_inline
    from producer_workers.worker.worker import Worker
    from rolloutmq.testing import RehearsalError, rehearse

_NAMES = {
    "buffer.control.control": "Mode",
    "buffer.errors": "ConfigError RolloutMQError",
    "buffer.ledger.position": "Position",
    "buffer.model.limits": "RunLimits TaskLimits",
    "buffer.model.manifest": "Manifest NotReady",
    "buffer.redis.server.embedded": "EmbeddedServer",
    "buffer.redis.store": "Store",
    "buffer.replay_buffer": "ReplayBuffer",
    "buffer.wire.group": "RolloutGroup",
    "buffer.wire.rollout": "MediaRef PolicyVersion RolloutState Status ToolCall VersionSpan",
    "buffer.wire.sampling": "SampleParams",
    "buffer.run": "Run",
    "buffer.weights.shared_folder": "FolderSender",
    "consumer.async_consumer": "AsyncRolloutConsumer",
    "consumer.batches.batch": "Batch",
    "consumer.batches.torch_dataset": "BatchDataset padded_tensors",
    "consumer.publication": "publish",
    "consumer.rollout_consumer": "RolloutConsumer",
    "consumer.sharded_consumer": "ShardedConsumer",
    "consumer.training.checkpoint": "CheckpointFolder",
    "producer_workers.agent_loops.agent_loop": "AgentLoop",
    "producer_workers.agent_loops.environment": "Answer Environment",
    "producer_workers.agent_loops.multi_turn": "MultiTurnAgentLoop",
    "producer_workers.agent_loops.single_turn": "SingleTurnAgentLoop run_all",
    "producer_workers.datasets.dataset": "Dataset",
    "producer_workers.engines.base": "Engine",
    "producer_workers.judges.judge": "GroupJudge Judge",
    "producer_workers.producer.producer": "AgentLoopManager",
    "producer_workers.user_code.runs_inline": "runs_inline",
    "producer_workers.worker.worker": "Worker",
    "rolloutmq.testing": "RehearsalError rehearse",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "AgentLoop", "AgentLoopManager", "Answer", "AsyncRolloutConsumer", "Batch", "BatchDataset",
    "CheckpointFolder", "ConfigError", "Dataset", "EmbeddedServer", "Engine", "Environment",
    "FolderSender", "GroupJudge", "Judge", "Manifest", "MediaRef", "Mode", "MultiTurnAgentLoop",
    "NotReady", "PolicyVersion", "Position", "RehearsalError", "ReplayBuffer",
    "RolloutConsumer", "RolloutGroup", "RolloutMQError", "RolloutState", "Run", "RunLimits",
    "SampleParams", "ShardedConsumer", "SingleTurnAgentLoop", "Status", "Store", "TaskLimits",
    "ToolCall", "VersionSpan", "Worker", "padded_tensors", "publish", "rehearse", "run_all",
    "runs_inline",
]  # fmt: skip

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Load a name from its module, at its first use."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value
