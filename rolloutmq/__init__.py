"""The public names of the project, each loaded at its first use: the command starts at once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Must be first: it finds the packages below even beside a user's file of the same name.
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
    from consumer.grpo.checkpoint import CheckpointFolder
    from consumer.handle.async_consumer import AsyncRolloutConsumer
    from consumer.handle.batch import Batch
    from consumer.handle.publication import publish
    from consumer.handle.rollout_consumer import RolloutConsumer
    from consumer.handle.sharded_consumer import ShardedConsumer
    from consumer.handle.torch_dataset import BatchDataset, padded_tensors
    from producer_workers.agent_loops.agent_loop import AgentLoop
    from producer_workers.agent_loops.environment import Answer, Environment
    from producer_workers.agent_loops.multi_turn import MultiTurnAgentLoop
    from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop, run_all
    from producer_workers.datasets.dataset import Dataset
    from producer_workers.engines.base import Engine
    from producer_workers.judges.judge import Judge
    from producer_workers.producer.producer import Producer as AgentLoopManager
    from producer_workers.user_code.border import runs_inline
    from producer_workers.worker.worker import Worker
    from rolloutmq.testing import RehearsalError, rehearse
else:
    _MODULES = {
        "AgentLoop": "producer_workers.agent_loops.agent_loop",
        "AgentLoopManager": "producer_workers.producer.producer:Producer",
        "Answer": "producer_workers.agent_loops.environment",
        "AsyncRolloutConsumer": "consumer.handle.async_consumer",
        "Batch": "consumer.handle.batch",
        "BatchDataset": "consumer.handle.torch_dataset",
        "CheckpointFolder": "consumer.grpo.checkpoint",
        "ConfigError": "buffer.errors",
        "Dataset": "producer_workers.datasets.dataset",
        "EmbeddedServer": "buffer.redis.server.embedded",
        "Engine": "producer_workers.engines.base",
        "Environment": "producer_workers.agent_loops.environment",
        "FolderSender": "buffer.weights.shared_folder",
        "Judge": "producer_workers.judges.judge",
        "Manifest": "buffer.model.manifest",
        "MediaRef": "buffer.wire.rollout",
        "Mode": "buffer.control.control",
        "MultiTurnAgentLoop": "producer_workers.agent_loops.multi_turn",
        "NotReady": "buffer.model.manifest",
        "PolicyVersion": "buffer.wire.rollout",
        "Position": "buffer.ledger.position",
        "RehearsalError": "rolloutmq.testing",
        "ReplayBuffer": "buffer.replay_buffer",
        "RolloutConsumer": "consumer.handle.rollout_consumer",
        "RolloutGroup": "buffer.wire.group",
        "RolloutMQError": "buffer.errors",
        "RolloutState": "buffer.wire.rollout",
        "Run": "buffer.run",
        "RunLimits": "buffer.model.limits",
        "SampleParams": "buffer.wire.sampling",
        "ShardedConsumer": "consumer.handle.sharded_consumer",
        "SingleTurnAgentLoop": "producer_workers.agent_loops.single_turn",
        "Status": "buffer.wire.rollout",
        "Store": "buffer.redis.store",
        "TaskLimits": "buffer.model.limits",
        "ToolCall": "buffer.wire.rollout",
        "VersionSpan": "buffer.wire.rollout",
        "Worker": "producer_workers.worker.worker",
        "runs_inline": "producer_workers.user_code.border",
        "padded_tensors": "consumer.handle.torch_dataset",
        "publish": "consumer.handle.publication",
        "rehearse": "rolloutmq.testing",
        "run_all": "producer_workers.agent_loops.single_turn",
    }

    # Type checkers must not see it: they would accept any name.
    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, alias_of = _MODULES[name].partition(":")
        value = getattr(import_module(module), alias_of or name)
        globals()[name] = value
        return value


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
    "padded_tensors",
    "publish",
    "rehearse",
    "run_all",
    "runs_inline",
]
