"""The contract between rollout workers and trainers: groups, their wire format, and their life in Redis.

Imports no torch, vllm, rq or transformers. `buffer/README.md` draws the states, keys and scripts.
"""

from buffer.account import Account, Audit, TaskAccount
from buffer.batch_status import ProduceBatchStatus, batch_status
from buffer.control import ControlState, Mode, RunControl, new_nonce
from buffer.errors import RolloutMQError
from buffer.fleet import Fleet
from buffer.group import RolloutGroup
from buffer.job import Claim, Job, Result
from buffer.jobs import JobQueue
from buffer.keys import Keys, group_id, split_group_id
from buffer.ledger import BatchLedger
from buffer.limits import RunLimits, TaskLimits
from buffer.manifest import Manifest, ManifestEntry, NotReady
from buffer.order import Finished
from buffer.pools import PoolSizes
from buffer.recovery.position import Position
from buffer.replay_buffer import ReplayBuffer
from buffer.rollout import (
    MediaRef,
    PolicyVersion,
    RolloutState,
    SampleParams,
    Status,
    ToolCall,
    VersionSpan,
)
from buffer.run import Run
from buffer.store import Store
from buffer.worker_record import Pulse, WorkerRecord, WorkerState

__all__ = [
    "Account",
    "Audit",
    "BatchLedger",
    "Claim",
    "ControlState",
    "Finished",
    "Fleet",
    "Job",
    "JobQueue",
    "Keys",
    "Manifest",
    "ManifestEntry",
    "MediaRef",
    "Mode",
    "NotReady",
    "PolicyVersion",
    "PoolSizes",
    "Position",
    "ProduceBatchStatus",
    "Pulse",
    "ReplayBuffer",
    "Result",
    "RolloutGroup",
    "RolloutMQError",
    "RolloutState",
    "Run",
    "RunControl",
    "RunLimits",
    "SampleParams",
    "Status",
    "Store",
    "TaskAccount",
    "TaskLimits",
    "ToolCall",
    "VersionSpan",
    "WorkerRecord",
    "WorkerState",
    "batch_status",
    "group_id",
    "new_nonce",
    "split_group_id",
]
