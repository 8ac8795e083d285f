"""Every Redis key of the project; no other module builds keys.

A new key is a row of `TABLE`, an attribute or method of `Keys` or an entry of `SLOTS`, and a name
in the header of a script. `make docs` adds it to the page of all keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from buffer.errors import ScriptError
from buffer.ids import ENDS, LANES, POOLS, valid_name


class KeyRow(NamedTuple):
    """A kind of key. `saved`: `Run.save` copies it; what is False belongs to living processes."""

    type: str
    holds: str
    saved: bool = True


TABLE: Mapping[str, KeyRow] = {
    # the run
    "meta": KeyRow(
        "HASH",
        "schema, nonce, created_ms, the limits of the run, what its draws mean (`origin`), what "
        "`rolloutmq set` changed (`settings`); continues: the run whose checkpoint it was made "
        "again from",
    ),
    "control": KeyRow(
        "HASH",
        "epoch, mode, open lanes, newest weights, trainer, producer; "
        "the pub/sub channel of the same name carries hints",
    ),
    "clock": KeyRow(
        "HASH", "the server's clock as last seen, to notice outages and steps", saved=False
    ),
    "report": KeyRow(
        "HASH",
        "JSON of the newest metrics: `train` of the last train step, `eval:<task>` of the last "
        "evaluation of a task",
    ),
    "lineages": KeyRow("LIST", '"lineage:S" for every opening of a trainer, in order'),
    "events": KeyRow("STREAM", "one short entry per transition, capped", saved=False),
    "bell:<who>": KeyRow(
        "LIST", "wakes idle workers, producer, trainer; a lost wake-up is harmless", saved=False
    ),
    # groups
    "jobs:<task>:<lane>": KeyRow("STREAM", "waiting jobs; XLEN is the backlog"),
    "group:<gid>": KeyRow("HASH", "the record of one group, short fields only"),
    "leases": KeyRow(
        "ZSET", "worker that holds groups by its deadline (ms of the server's clock)", saved=False
    ),
    "pool:<task>:<status>": KeyRow(
        "ZSET", '"<arrival>:<gid>" by oldest policy version (+inf without one)'
    ),
    "age:<task>": KeyRow(
        "ZSET", "gid by oldest policy version, of groups that wait or run and have tokens"
    ),
    "progress:<task>": KeyRow("HASH", "cursor, target and the account of a task, cumulative"),
    "cursors": KeyRow(
        "HASH",
        "next draw by task, for the producer; workers cannot write it (ACL); "
        "`progress` has a copy, for people and the account",
    ),
    "ended:<task>:<stage>": KeyRow(
        "STRING", "bitmap: bit n = draw n is archived / filtered / dropped"
    ),
    "dead": KeyRow("ZSET", "gid by time of death (ms)"),
    "dead:<gid>": KeyRow("STRING", "why, as JSON; `reason`: see `buffer/failure_text.py`"),
    # payloads
    "payload:<gid>:<token>": KeyRow("STRING", "msgpack; more chunks as …:<token>:1, :2 …"),
    "garbage": KeyRow("SET", '"<gid> <token> <chunks>": payloads that are not needed any more'),
    "bytes": KeyRow("HASH", "came, went: payload bytes of all groups, cumulative"),
    # steps of a consumer
    "ledger:<name>": KeyRow(
        "HASH",
        "taken, committed, keep, freed (= archived), forgotten, exported: "
        "steps of a consumer (train, eval); awaits: a taken one that lacks groups",
    ),
    "batch:<name>:<step>": KeyRow("LIST", "the manifest of one taken batch, a header first"),
    # workers
    "workers": KeyRow("ZSET", "worker by last heartbeat (ms of the server's clock)", saved=False),
    "worker:<id>": KeyRow(
        "HASH", "engine, weights, state, acknowledged epoch, counters", saved=False
    ),
    "leased:<id>": KeyRow(
        "HASH",
        "what the worker's registration holds: token by gid, and `digest` of them all "
        "(`buffer/lua/shared/workers.lua`); exists while it holds a group",
        saved=False,
    ),
    "bad_submissions": KeyRow(
        "HASH",
        '"since_ms bad barred_ms" by worker: number of submitted groups that no trainer can use, '
        "and since when it may not claim (0: it may)",
        saved=False,
    ),
    # weights
    "weights": KeyRow(
        "LIST",
        '"lineage:version" of what is in Redis, the oldest first '
        '([policy] weights_transport = "redis")',
        saved=False,
    ),
    "weights:<lineage>:<version>": KeyRow(
        "STRING",
        "manifest of one; its files in chunks: …:<version>:1, :2 …",
        saved=False,
    ),
}
"""Every key by what follows `rmq:{run}:`, where `{run}` is a cluster hash tag: one slot for all."""

_BY_FORM = {(name.partition(":")[0], ":" in name): row for name, row in TABLE.items()}


def row_of(key: str) -> KeyRow | None:
    """Return the row of a key of any run; None if no kind of key has this form."""
    first, colon, _ = key.partition("}:")[2].partition(":")
    return _BY_FORM.get((first, bool(colon)))


EVERY_META = "rmq:{*}:meta"  # pattern for all runs on a server


EVERY_CONTROL = "rmq:{*}:control"


def run_of_key(key: str) -> str:
    return key.removeprefix("rmq:{").partition("}:")[0]


def control_beside(key: str) -> str:
    return key.partition("}:")[0] + "}:control"


def clock_beside(key: str) -> str:
    return key.partition("}:")[0] + "}:clock"


class Keys:
    """Builds the keys of one run. Their hash tag is the run: a cluster has them on one node."""

    def __init__(self, run: str) -> None:
        self.run = valid_name("run", run)
        self.prefix = f"rmq:{{{run}}}:"
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
        self.manifests = self.prefix + "batch:"
        self.groups = self.prefix + "group:"
        self.queues = self.prefix + "jobs:"
        self.accounts = self.prefix + "progress:"
        self.pools = self.prefix + "pool:"
        self.ages = self.prefix + "age:"
        self.ends = self.prefix + "ended:"
        self.leased_by = self.prefix + "leased:"
        self.worker_records = self.prefix + "worker:"
        self.dead_letters = self.prefix + "dead:"
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
        return f"{self.prefix}bell:{who}"

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

    Keys of the run, and prefixes, are attributes of `Keys`. SLOTS builds the others from facts
    (task, lane, status, worker, gid, ledger, step, lineage, version); by default, the ledger is the
    trainer's.
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


SLOTS: Mapping[str, str] = {
    "record": "group:{gid}",
    "worker_record": "worker:{worker}",
    "leased": "leased:{worker}",
    "progress": "progress:{task}",
    "jobs": "jobs:{task}:{lane}",
    **{f"jobs_{lane}": f"jobs:{{task}}:{lane}" for lane in LANES},
    "pool": "pool:{task}:{status}",
    **{status: f"pool:{{task}}:{status}" for status in POOLS},
    "age_index": "age:{task}",
    **{end: f"ended:{{task}}:{end}" for end in ENDS},
    "ledger": "ledger:{ledger}",
    "ledger_train": "ledger:train",
    "batch": "batch:{ledger}:{step}",
    "batches": "batch:{ledger}:",
    "weights_manifest": "weights:{lineage}:{version}",
    **{f"bell_{who}": f"bell:{who}" for who in ("workers", "producer", "trainer", "receipts")},
}
"""Keys that depend on facts, by their names in script headers."""
