"""Builds every Redis key of the project; no other module does.

The kinds of keys are the rows of `key_table.TABLE`. A script names a key in its header by the name
of its row, or by one in `SLOTS`; a prefix is an attribute of `Keys`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from buffer.errors import ScriptError
from buffer.ids import LANES, POOLS, valid_name
from buffer.redis.key_table import TABLE

EVERY_META = "rmq:{*}:meta"  # pattern for all runs on a server


EVERY_CONTROL = "rmq:{*}:control"


def run_of_key(key: str) -> str:
    return key.removeprefix("rmq:{").partition("}:")[0]


def control_beside(key: str) -> str:
    return key.partition("}:")[0] + "}:control"


def clock_beside(key: str) -> str:
    return key.partition("}:")[0] + "}:clock"


LIMITS = "rmq-limit:"
"""The beginning of the keys of limits on calls, which belong to no run."""


class Keys:
    """Builds the keys of one run. Their hash tag is the run: a cluster has them on one node.

    `space` LIMITS: those of the limit on calls that has this name.
    """

    def __init__(self, run: str, space: str = "rmq:") -> None:
        self.run = valid_name("run", run)
        self.prefix = f"{space}{{{run}}}:"
        self.meta = self.prefix + "meta"
        self.control = self.prefix + "control"
        self.clock = self.prefix + "clock"
        self.report = self.prefix + "report"
        self.lineages = self.prefix + "lineages"
        self.leases = self.prefix + "leases"
        self.garbage = self.prefix + "garbage"
        self.bytes = self.prefix + "bytes"
        self.dead = self.prefix + "dead"
        self.workers = self.prefix + "workers"
        self.bad_submissions = self.prefix + "bad_submissions"
        self.cursors = self.prefix + "cursors"
        self.events = self.prefix + "events"
        self.weights = self.prefix + "weights"
        self.verdicts = self.prefix + "verdicts"
        self.verdicts_before = self.prefix + "verdicts_before"
        self.judge_use = self.prefix + "judge_use"
        self.manifests = self.prefix + "batch:"
        self.groups = self.prefix + "group:"
        self.queues = self.prefix + "jobs:"
        self.accounts = self.prefix + "progress:"
        self.pools = self.prefix + "pool:"
        self.ages = self.prefix + "age:"
        self.ends = self.prefix + "ended:"
        self.leased_by = self.prefix + "leased:"
        self.worker_records = self.prefix + "worker:"
        self.worker_tokens_of = self.prefix + "tokens:"
        self.dead_letters = self.prefix + "dead:"
        self.limit_records = self.prefix + "limit_caller:"
        self.bells = self.prefix + "bell:"
        self.judge_queue = f"rmq-judge:{run}"
        """rq's name of the queue of judge jobs; the names of its workers begin with it, too"""
        # rq permits letters, digits, _ and - only; "_-" is in no name written this way, so no
        # run's prefix begins that of another
        self.judge_jobs = f"rmq-judge-{run.replace('_', '_u').replace('.', '_d')}_-"
        """the beginning of rq's ids of these jobs"""
        self.judge_patterns = (
            f"rq:*:{self.judge_queue}",
            f"rq:*:{self.judge_queue}:*",
            f"rq:*:{self.judge_jobs}*",
        )
        """rq's keys of this queue and its jobs"""

    def slots(self, **facts: str | int) -> SlotKeys:
        """Return the keys that scripts name in their headers, by name; `facts`: see `SlotKeys`."""
        return SlotKeys(self, facts)

    def jobs(self, task: str, lane: str) -> str:
        return f"{self.queues}{task}:{lane}"

    def wake_up(self, who: str) -> str:
        return self.bells + who

    def group(self, gid: str) -> str:
        return self.groups + gid

    def pool(self, task: str, status: str) -> str:
        return f"{self.pools}{task}:{status}"

    def age(self, task: str) -> str:
        return self.ages + task

    def payload(self, gid: str, token: str, chunk: int = 0) -> str:
        suffix = f":{chunk}" if chunk else ""
        return f"{self.prefix}payload:{gid}:{token}{suffix}"

    def payload_chunks(self, gid: str, token: str, chunks: int) -> list[str]:
        return [self.payload(gid, token, chunk) for chunk in range(chunks)]

    def ledger(self, name: str) -> str:
        return f"{self.prefix}ledger:{name}"

    def batches(self, ledger: str) -> str:
        return f"{self.manifests}{ledger}:"

    def batch(self, ledger: str, step: int) -> str:
        return f"{self.batches(ledger)}{step}"

    def progress(self, task: str) -> str:
        return f"{self.accounts}{task}"

    def ended(self, task: str, stage: str) -> str:
        return f"{self.ends}{task}:{stage}"

    def skips(self, task: str) -> str:
        return f"{self.prefix}skips:{task}"

    def dead_letter(self, gid: str) -> str:
        return self.dead_letters + gid

    def worker(self, worker: str) -> str:
        return self.worker_records + worker

    def weights_part(self, label: str, chunk: int = 0) -> str:
        """Return the key of the manifest of weights, or of one of their chunks, counted from 1."""
        return f"{self.weights}:{label}:{chunk}" if chunk else f"{self.weights}:{label}"

    def leased(self, worker: str) -> str:
        return self.leased_by + worker

    def all_pools(self, tasks: Iterable[str]) -> list[str]:
        return [self.pool(task, status) for task in tasks for status in POOLS]


class SlotKeys(dict[str, str]):
    """Finds the keys of a script by the names in its header, each once.

    Prefixes are attributes of `Keys`. SLOTS builds keys from facts (task, lane, status, worker,
    gid, ledger, step, lineage, version); by default, the ledger is the trainer's.
    """

    __slots__ = ("_facts", "_keys")

    def __init__(self, keys: Keys, facts: Mapping[str, str | int]) -> None:
        self._keys = keys
        self._facts = {"ledger": "train", **facts}

    def __missing__(self, slot: str) -> str:
        """Raise ScriptError for an unknown name, or a missing fact."""
        key = self._keys.__dict__.get(slot)
        if key is None:
            pattern = SLOTS.get(slot)
            if pattern is None:
                raise ScriptError(
                    f"no key is named {slot!r}", hint="see SLOTS in buffer/redis/keys.py"
                )
            try:
                key = self._keys.prefix + pattern.format_map(self._facts)
            except KeyError as missing:
                raise ScriptError(
                    f"the key {slot!r} of a script needs its {missing.args[0]}"
                ) from None
        self[slot] = str(key)
        return self[slot]


_FACTS = {"<gid>": "{gid}", "<id>": "{worker}", "<name>": "{ledger}"}


def _pattern(key: str) -> str:
    return re.sub(r"<\w+>", lambda part: _FACTS.get(part[0], f"{{{part[0][1:-1]}}}"), key)


SLOTS: Mapping[str, str] = {
    **{row.name or key: _pattern(key) for key, row in TABLE.items() if row.name or "<" not in key},
    **{f"jobs_{lane}": f"jobs:{{task}}:{lane}" for lane in LANES},
    **{status: f"pool:{{task}}:{status}" for status in POOLS},
    "ledger_train": "ledger:train",
    "ledger_eval": "ledger:eval",
    "batches": "batch:{ledger}:",
    **{f"bell_{who}": f"bell:{who}" for who in ("workers", "producer", "trainer", "receipts")},
}
"""The keys that script headers name, without their prefix, made of facts."""
