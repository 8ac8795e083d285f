"""Post-train LLMs with rollouts that travel through Redis: the public names of the project.

    from rolloutmq import RolloutConsumer, Run, Store

Each name is loaded when it is first used, so `import rolloutmq` loads no torch, vllm, transformers
or rq.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from buffer.batches.position import Position
    from buffer.control.control import Mode
    from buffer.errors import ConfigError, RolloutMQError
    from buffer.model.group import RolloutGroup
    from buffer.model.limits import RunLimits, TaskLimits
    from buffer.model.manifest import Manifest, NotReady
    from buffer.model.rollout import (
        MediaRef,
        PolicyVersion,
        RolloutState,
        SampleParams,
        Status,
        ToolCall,
        VersionSpan,
    )
    from buffer.replay_buffer import ReplayBuffer
    from buffer.run import Run
    from buffer.server.embedded import EmbeddedServer
    from buffer.store.store import Store
    from buffer.weights.shared_folder import FolderSender
    from consumer.async_consumer import AsyncRolloutConsumer
    from consumer.batches.batch import Batch
    from consumer.batches.torch_dataset import BatchDataset, padded_tensors
    from consumer.publication import publish
    from consumer.rollout_consumer import RolloutConsumer
    from consumer.sharded_consumer import ShardedConsumer
    from consumer.training.checkpoint import CheckpointFolder
    from producer_workers.agent_loops.agent_loop import AgentLoop
    from producer_workers.agent_loops.multi_turn import Answer, Environment, MultiTurnAgentLoop
    from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop, run_all
    from producer_workers.datasets.dataset import Dataset
    from producer_workers.engines.base import Engine
    from producer_workers.judges.judge import GroupJudge, Judge
    from producer_workers.producer.producer import AgentLoopManager
    from producer_workers.worker.worker import Worker
    from rolloutmq.testing import RehearsalError, rehearse

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
    "padded_tensors",
    "publish",
    "rehearse",
    "run_all",
]

_MODULES = {
    "buffer.batches.position": "Position",
    "buffer.control.control": "Mode",
    "buffer.model.group": "RolloutGroup",
    "buffer.model.limits": "RunLimits TaskLimits",
    "buffer.model.manifest": "Manifest NotReady",
    "buffer.model.rollout": "MediaRef PolicyVersion RolloutState SampleParams Status ToolCall VersionSpan",
    "buffer.errors": "ConfigError RolloutMQError",
    "buffer.replay_buffer": "ReplayBuffer",
    "buffer.run": "Run",
    "buffer.server.embedded": "EmbeddedServer",
    "buffer.store.store": "Store",
    "consumer.async_consumer": "AsyncRolloutConsumer",
    "consumer.batches.batch": "Batch",
    "consumer.batches.torch_dataset": "BatchDataset padded_tensors",
    "consumer.rollout_consumer": "RolloutConsumer",
    "consumer.sharded_consumer": "ShardedConsumer",
    "consumer.training.checkpoint": "CheckpointFolder",
    "producer_workers.agent_loops.agent_loop": "AgentLoop",
    "producer_workers.agent_loops.multi_turn": "Answer Environment MultiTurnAgentLoop",
    "producer_workers.agent_loops.single_turn": "SingleTurnAgentLoop run_all",
    "producer_workers.datasets.dataset": "Dataset",
    "producer_workers.engines.base": "Engine",
    "producer_workers.judges.judge": "GroupJudge Judge",
    "producer_workers.producer.producer": "AgentLoopManager",
    "producer_workers.worker.worker": "Worker",
    "rolloutmq.testing": "RehearsalError rehearse",
    "buffer.weights.shared_folder": "FolderSender",
    "consumer.publication": "publish",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Load a public name from its module when it is first used."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
