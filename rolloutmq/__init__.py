"""The public names of the project, each loaded at its first use: the command starts at once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Must be first: it finds the packages below even beside a user's file of the same name.
from rolloutmq import own_packages as own_packages

# isort: split

if TYPE_CHECKING:
    from buffer.config.section import Section as Section
    from buffer.control.control import Mode as Mode
    from buffer.errors import ConfigError as ConfigError
    from buffer.errors import RolloutMQError as RolloutMQError
    from buffer.errors import Skip as Skip
    from buffer.groups.replay_buffer import ReplayBuffer as ReplayBuffer
    from buffer.ledger.position import Position as Position
    from buffer.limits import RunLimits as RunLimits
    from buffer.limits import TaskLimits as TaskLimits
    from buffer.manifest import Manifest as Manifest
    from buffer.manifest import NotReady as NotReady
    from buffer.observers import Observer as Observer
    from buffer.redis.server.embedded import EmbeddedServer as EmbeddedServer
    from buffer.redis.store import Store as Store
    from buffer.run.run import Run as Run
    from buffer.weights.shared_folder import FolderSender as FolderSender
    from buffer.wire.column import Column as Column
    from buffer.wire.group import RolloutGroup as RolloutGroup
    from buffer.wire.rollout import MediaRef as MediaRef
    from buffer.wire.rollout import PolicyVersion as PolicyVersion
    from buffer.wire.rollout import RolloutState as RolloutState
    from buffer.wire.rollout import Status as Status
    from buffer.wire.rollout import ToolCall as ToolCall
    from buffer.wire.rollout import VersionSpan as VersionSpan
    from buffer.wire.sampling import SampleParams as SampleParams
    from consumer.handle.async_consumer import AsyncRolloutConsumer as AsyncRolloutConsumer
    from consumer.handle.batch import Batch as Batch
    from consumer.handle.checkpoint import CheckpointFolder as CheckpointFolder
    from consumer.handle.checkpointed_consumer import CheckpointedConsumer as CheckpointedConsumer
    from consumer.handle.publication import publish as publish
    from consumer.handle.rollout_consumer import RolloutConsumer as RolloutConsumer
    from consumer.handle.sharded_consumer import ShardedConsumer as ShardedConsumer
    from consumer.handle.torch_dataset import BatchDataset as BatchDataset
    from consumer.handle.torch_dataset import padded_tensors as padded_tensors
    from producer_workers.agent_loops.agent_loop import AgentLoop as AgentLoop
    from producer_workers.agent_loops.environment import Answer as Answer
    from producer_workers.agent_loops.environment import Environment as Environment
    from producer_workers.agent_loops.multi_turn import MultiTurnAgentLoop as MultiTurnAgentLoop
    from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop as SingleTurnAgentLoop
    from producer_workers.agent_loops.single_turn import run_all as run_all
    from producer_workers.config.attached_judge import AttachedJudge as AttachedJudge
    from producer_workers.config.attached_judge import ColumnJudge as ColumnJudge
    from producer_workers.config.task import NamedJudge as NamedJudge
    from producer_workers.datasets.dataset import Dataset as Dataset
    from producer_workers.engines.base import Engine as Engine
    from producer_workers.judges.judge import Judge as Judge
    from producer_workers.producer.producer import Producer
    from producer_workers.user_code.border import runs_inline as runs_inline
    from producer_workers.worker.worker import Worker as Worker
    from rolloutmq.testing import RehearsalError as RehearsalError
    from rolloutmq.testing import rehearse as rehearse

    AgentLoopManager = Producer

_NAMES = {
    "buffer.config.section": "Section",
    "buffer.control.control": "Mode",
    "buffer.errors": "ConfigError RolloutMQError Skip",
    "buffer.ledger.position": "Position",
    "buffer.limits": "RunLimits TaskLimits",
    "buffer.manifest": "Manifest NotReady",
    "buffer.observers": "Observer",
    "buffer.redis.server.embedded": "EmbeddedServer",
    "buffer.redis.store": "Store",
    "buffer.groups.replay_buffer": "ReplayBuffer",
    "buffer.run.run": "Run",
    "buffer.weights.shared_folder": "FolderSender",
    "buffer.wire.column": "Column",
    "buffer.wire.group": "RolloutGroup",
    "buffer.wire.rollout": "MediaRef PolicyVersion RolloutState Status ToolCall VersionSpan",
    "buffer.wire.sampling": "SampleParams",
    "consumer.handle.checkpoint": "CheckpointFolder",
    "consumer.handle.checkpointed_consumer": "CheckpointedConsumer",
    "consumer.handle.async_consumer": "AsyncRolloutConsumer",
    "consumer.handle.batch": "Batch",
    "consumer.handle.publication": "publish",
    "consumer.handle.rollout_consumer": "RolloutConsumer",
    "consumer.handle.sharded_consumer": "ShardedConsumer",
    "consumer.handle.torch_dataset": "BatchDataset padded_tensors",
    "producer_workers.agent_loops.agent_loop": "AgentLoop",
    "producer_workers.agent_loops.environment": "Answer Environment",
    "producer_workers.agent_loops.multi_turn": "MultiTurnAgentLoop",
    "producer_workers.agent_loops.single_turn": "SingleTurnAgentLoop run_all",
    "producer_workers.config.attached_judge": "AttachedJudge ColumnJudge",
    "producer_workers.config.task": "NamedJudge",
    "producer_workers.datasets.dataset": "Dataset",
    "producer_workers.engines.base": "Engine",
    "producer_workers.judges.judge": "Judge",
    "producer_workers.producer.producer": "AgentLoopManager",
    "producer_workers.user_code.border": "runs_inline",
    "producer_workers.worker.worker": "Worker",
    "rolloutmq.testing": "RehearsalError rehearse",
}
_ALIASES = {"AgentLoopManager": "Producer"}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_MODULES)

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), _ALIASES.get(name, name))
        globals()[name] = value
        return value
