"""docs/pages/moving.md: no public name of XTuner's data path is forgotten, and its calls can be made."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from buffer.groups.replay_buffer import ReplayBuffer
from buffer.run.run import Run
from tests.programs import ROOT

PAGE = (ROOT / "docs" / "pages" / "moving.md").read_text(encoding="utf-8")

XTUNER = [
    "AgentLoop", "AgentLoopManager", "AsyncProduceStrategy", "AsyncProduceStrategyConfig",
    "AsyncReplayBufferConfig", "AsyncScheduler", "DataManager", "DisaggAgentLoopManager",
    "DisaggAsyncProduceStrategy", "DisaggProduceProgress", "Env", "Evaluator", "FIFOReplayPolicy",
    "IsValidSampleFn", "Judger", "MultiTurnAgent", "MultiTurnToolAgent", "NaiveStorage", "Packer",
    "PandasStorage", "ProduceBatchStatus", "ProduceContext", "ProduceProgress", "ProduceStrategy",
    "ProduceStrategyConfig", "QueryDict", "ReplayBuffer", "ReplayPolicy", "RolloutController",
    "RolloutState", "SampleParams", "Sampler", "SamplerWithReplayBuffer", "Scheduler",
    "ShouldContinueFn", "SingleTurnAgent", "SingleTurnAgentLoop", "StalenessReplayPolicy", "Status",
    "StorageBackend", "StorageItem", "SyncProduceStrategy", "SyncProduceStrategyConfig",
    "SyncReplayBufferConfig", "SyncScheduler", "TrainController", "_PendingTasks",
    "add_produce_time", "add_produced", "add_raw_rewards", "add_to_replay_buffer",
    "advance_future_step", "available_count", "begin_consume", "calculate_stale_threshold",
    "cancel_all", "claim_ready", "compute_advantages", "compute_old_logprobs",
    "compute_ref_logprobs", "compute_values", "consume_produce_time", "consume_produced",
    "consume_raw_rewards", "consumer_step", "continue_produce", "count", "count_statuses",
    "default_is_valid_sample_fn", "default_should_continue_fn", "delete", "ensure_target_upto",
    "evaluate", "finish_consume", "fit", "generate_group", "get", "get_batch", "get_group_status",
    "is_model_expired", "is_ready", "load_state_dict", "mark_consumed", "maybe_expire_group",
    "pack_pad_dispatch", "pause_produce", "pending_task_count", "produce_batch", "produce_loop",
    "put", "put_generated_group", "refresh_seq_staleness", "refresh_staleness",
    "reset_rollout_response", "resume", "sample_from_dataset", "sample_group", "save",
    "schedule_one", "should_abort", "state_dict", "sync_weights", "take_batch", "target_abs",
    "train", "update", "update_sample_version", "wait_and_claim", "data_source",
    "enable_partial_rollout", "error_msg", "extra_fields", "finish_reason", "group_id", "input_ids",
    "is_valid_sample_fn", "labels", "logprobs", "loss_mask", "max_pending_tasks", "max_staleness",
    "max_token_staleness", "message", "message_uid", "mm_infer_info", "mm_info", "mm_train_info",
    "num_tokens", "num_tries", "over_sample_threshold", "position_ids", "prompt_ids",
    "prompt_repeat_k", "proxy_attn_flops", "raw_prompt", "response", "response_ids",
    "response_mask", "response_model_steps", "reward", "reward_model", "rollout_id",
    "routed_experts", "sample_params", "seq_staleness", "session_id", "should_continue_fn",
    "status", "statuses", "sync_weights_interval", "tail_batch_max_tries",
    "tail_batch_trigger_size", "task_name", "timestamp_id", "tokens", "tool_calls", "tool_choice",
    "tools", "train_prompt_ids", "uid",
]  # fmt: skip
"""Public classes, methods and fields of the reference (commits 213c353f6 and b934f462)."""


def calls() -> list[str]:
    section = PAGE.partition("### Replay buffer")[2].partition("###")[0]
    ours = "".join(re.findall(r"^\| .*? \| (.*) \|$", section, re.M))
    return re.findall(r"`(\w+\([^`]*\))`", ours)


@pytest.mark.parametrize("call", calls())
def test_a_call_of_the_replay_buffer_can_be_made_as_printed(call: str) -> None:
    made = ast.parse(call.replace("…", "0"), mode="eval").body
    assert isinstance(made, ast.Call)
    assert isinstance(made.func, ast.Name)
    owner = ReplayBuffer if hasattr(ReplayBuffer, made.func.id) else Run
    signature = inspect.signature(getattr(owner, made.func.id))
    given = {str(each.arg): 0 for each in made.keywords}
    signature.bind(None, *made.args, **given)
