"""Settings and commands that were removed before 0.1.0, and what to use instead.

A config or a command line that names one gets this sentence as its error. This file can be deleted
after 0.1.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_NO_SIGNATURES = "signatures were removed; use TLS, and a user of the server per role"

SETTINGS: Mapping[str, str] = {
    "policy.weights_host": "the transports gloo and nccl were removed; delete this key",
    'policy.weights_transport = "gloo"': (
        'removed; use "folder" (on /dev/shm or a network file system), or "redis"'
    ),
    'policy.weights_transport = "nccl"': (
        'removed; use "folder" (on /dev/shm or a network file system), or "redis"'
    ),
    "run.media": (
        "removed; images lie in the run's folder, and [run] columns is a folder for large columns"
    ),
    "audit": "audits were removed; SECURITY.md says how to recompute logprobs",
    "trainer.keys_file": _NO_SIGNATURES,
    "worker.key_file": _NO_SIGNATURES,
    "producer.key_file": _NO_SIGNATURES,
    "launch.teacher_gpus": (
        "removed; each worker loads the teachers on its own GPUs, or asks a server (kind http)"
    ),
    "tasks.*.teachers.*.workers": (
        "removed; each rollout worker has the teacher's engine, or asks a server (kind http)"
    ),
    "plan.curriculum": (
        "removed; change the weights from outside: `rolloutmq set tasks.math.weight=2`, or "
        "`run.set` in a loop of your own"
    ),
}
"""By key, or by key and value. `*` stands for the name of a task or of a teacher."""

COMMANDS: Mapping[str, str] = {
    "top": "use `rolloutmq status --follow`",
    "tail": "use `rolloutmq logs events`, with -f to follow",
    "scripts": "use `python -m buffer.redis.script_list`",
    "audit": "watch `mismatch/*`, or recompute logprobs of exported batches (SECURITY.md)",
    "worker --teacher": "the workers of the run ask the teachers themselves",
    "key": "signatures were removed; use TLS and a user of the server per role (`rolloutmq acl`)",
}


def removed_setting(key: str, value: str) -> str | None:
    """Return what to use instead of a setting; None if it was never there."""
    key = re.sub(r"\b(tasks|teachers)\.[^.]+", r"\1.*", key)
    return SETTINGS.get(key) or SETTINGS.get(f"{key} = {value}")
