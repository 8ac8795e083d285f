"""The table of all Redis keys of a run. A new key is one row here.

What follows from a row: who may write the key (`server/acl.py`), whether `Run.save` copies it
(`buffer/snapshot`), what `fsck` checks (`key_fields.py`, `buffer/ledger/key_check.py`), the key's
name in the headers of scripts (`keys.py`), and its line on the page of all keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from types import MappingProxyType
from typing import Literal, NamedTuple

_COUNT = r"\d{1,16}"
_NUMBER = r"-?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|-?inf|nan"
_NAME = r"[\w.-]{1,64}"
_TOKEN = r"[\w.:-]{1,64}"
_MODE = "run|drain|abort|keep|finish"
_LANES = "(eval|resume|fresh| )*"
_WEIGHTS = rf"{_NAME}:\d{{1,16}}"
LANE = "eval|resume|fresh"

TOKEN_ROWS = (
    *("trained", "masked", "evaluated", "filtered", "expired", "dropped", "resampled"),
    *("failed", "dead", "skipped", "lost"),
)
"""Where a sampled token ends: in exactly one of these, or it is still in a stage."""

ROLES = ("trainer", "producer")  # which one process holds

Forms = Mapping[str, str]
"""Regular expressions by the name of the field."""

_NO_FIELDS: Forms = MappingProxyType({})

Writer = Literal["producer", "worker"]

_ALL: tuple[Writer, ...] = ("producer", "worker")
_TIDY: tuple[Writer, ...] = ("producer",)
_WORKER: tuple[Writer, ...] = ("worker",)
_NONE: tuple[Writer, ...] = ()


class KeyRow(NamedTuple):
    """A kind of key.

    `writers`: roles that may write it, beside trainer and operator, who may write every key.
    `saved`: `Run.save` copies it; what is False belongs to living processes. `name`: in the headers
    of scripts; "" for that of the key itself. `required` and `optional`: fields of a hash;
    `others`: the form of those that neither names, "" for any.
    """

    type: str
    holds: str
    writers: tuple[Writer, ...] = _ALL
    saved: bool = True
    name: str = ""
    required: Forms = _NO_FIELDS
    optional: Forms = _NO_FIELDS
    others: str = ""


_END = "bitmap: bit n = draw n is archived / filtered / dropped / skipped"

TABLE: Mapping[str, KeyRow] = {
    # the run
    "meta": KeyRow(
        "HASH",
        "schema, nonce, created_ms, the limits of the run, what its draws mean (`origin`), what "
        "`rolloutmq set` changed (`settings`); continues: the run whose checkpoint it was made "
        "again from",
        _TIDY,
        required={"nonce": _TOKEN, "schema": _NAME, "created_ms": _COUNT},
        optional={"limits_version": _COUNT},
    ),
    "control": KeyRow(
        "HASH",
        "epoch, mode, open lanes, newest weights, trainer, producer; "
        "the pub/sub channel of the same name carries hints",
        _TIDY,
        required={
            "epoch": _COUNT,
            "mode": _MODE,
            "lanes": _LANES,
            "trainer_mode": _MODE,
            "operator_mode": _MODE,
            "weights": _WEIGHTS,
        },
        optional={
            **dict.fromkeys(ROLES, rf"({_TOKEN})?"),
            **dict.fromkeys(
                map("_".join, product(ROLES, ("seen_ms", "turns", "doing_ms"))), _COUNT
            ),
            **dict.fromkeys(
                ("changed_ms", "weights_ms", "recovering", "trainer_pause_ms", "trainer_waited_ms"),
                _COUNT,
            ),
        },
    ),
    "clock": KeyRow(
        "HASH",
        "the server's clock as last seen, to notice outages and steps",
        saved=False,
        optional=dict.fromkeys(("seen_ms", "swept_ms", "grace_until_ms"), _COUNT),
    ),
    "report": KeyRow(
        "HASH",
        "JSON of the newest metrics: `train` of the last train step, `eval:<task>` of the last "
        "evaluation of a task",
        _NONE,
    ),
    "lineages": KeyRow("LIST", '"lineage:S" for every opening of a trainer, in order', _NONE),
    "events": KeyRow("STREAM", "one short entry per transition, capped", saved=False),
    "bell:<who>": KeyRow(
        "LIST", "wakes idle workers, producer, trainer; a lost wake-up is harmless", saved=False
    ),
    # groups
    "jobs:<task>:<lane>": KeyRow("STREAM", "waiting jobs; XLEN is the backlog", name="jobs"),
    "group:<gid>": KeyRow(
        "HASH",
        "the record of one group, short fields only",
        name="record",
        required={
            "payload": _TOKEN,
            "chunks": r"[1-9]\d{0,3}",
            "size": _COUNT,
            "crc": "[0-9a-f]{0,8}",
            "samples": _COUNT,
            "version": r"\d{0,16}",
            "stage": "waiting|running|pool|taken|dead",
            "status": "init|completed|aborted|expired|failed",
            "task": _NAME,
            "draw": _COUNT,
            "tries": r"-?\d{1,16}",
            "aborts": _COUNT,
            "prompt": _COUNT,
        },
        optional={
            **dict.fromkeys(("tokens", "submitted_ms", "best", "made", "counted"), _COUNT),
            **dict.fromkeys(("last", "newest", "cut", "arrival"), r"-?\d{0,16}"),
            "reward": _NUMBER,
            "aged": rf"{_WEIGHTS}:{_COUNT}( {_WEIGHTS}:{_COUNT})*",
        },
    ),
    "leases": KeyRow(
        "ZSET", "worker that holds groups by its deadline (ms of the server's clock)", saved=False
    ),
    "pool:<task>:<status>": KeyRow(
        "ZSET", '"<arrival>:<gid>" by oldest policy version (+inf without one)', name="pool"
    ),
    "age:<task>": KeyRow(
        "ZSET",
        "gid by oldest policy version, of groups that wait or run and have tokens",
        name="age_index",
    ),
    "progress:<task>": KeyRow(
        "HASH",
        "cursor, target and the account of a task, cumulative",
        name="progress",
        optional={
            **dict.fromkeys(
                (
                    *("cursor", "enqueued", "target", "consumed", "running", "taken", "archived"),
                    *("dead", "filtered", "dropped", "skipped", "put", "imported", "reentered"),
                    *("highest_draw", "arrivals", "produced_groups", "produced_ms"),
                    *("produced_samples", "produced_tokens", "raw_rewards_count", "failed"),
                    *("expirations", "ended_early", "unmade_tokens", "discarded_tokens"),
                    *("failures_in_row", "filtered_in_row", "tail_step", "unparsed", "begins"),
                    *("error_ms", "leases_lost", "quarantined", "halt_step", "awaited"),
                    *("awaited_step", "truncated", "reasserted", "regenerated", "lost_to"),
                    "skips_from",
                    *(f"tokens_{row}" for row in ("sampled", "prompt", "again", *TOKEN_ROWS)),
                ),
                r"-?\d{1,16}",
            ),
            "raw_rewards_sum": _NUMBER,
        },
    ),
    "cursors": KeyRow(
        "HASH",
        "next draw by task, for the producer; workers cannot write it (ACL); "
        "`progress` has a copy, for people and the account",
        _TIDY,
    ),
    "ended:<task>:archived": KeyRow("STRING", _END, _TIDY, name="archived"),
    "ended:<task>:filtered": KeyRow("STRING", _END, name="filtered"),
    "ended:<task>:dropped": KeyRow("STRING", _END, name="dropped"),
    "ended:<task>:skipped": KeyRow("STRING", _END, name="skipped"),
    "skips:<task>": KeyRow(
        "LIST",
        '"<groups that had ended> <ms> <JSON>" of the newest 10,000 skipped groups, the newest '
        "first: which record, and why",
        name="skips",
    ),
    "dead": KeyRow("ZSET", "gid by time of death (ms)"),
    "dead:<gid>": KeyRow("STRING", "why, as JSON; `reason`: see `buffer/failure_text.py`"),
    # payloads
    "payload:<gid>:<token>": KeyRow("STRING", "msgpack; more chunks as …:<token>:1, :2 …"),
    "garbage": KeyRow("SET", '"<gid> <token> <chunks>": payloads that are not needed any more'),
    "bytes": KeyRow(
        "HASH",
        "came, went: payload bytes of all groups, cumulative",
        optional=dict.fromkeys(("came", "went"), _COUNT),
    ),
    # steps of a consumer
    "ledger:<name>": KeyRow(
        "HASH",
        "taken, committed, keep, freed (= archived), forgotten, exported: "
        "steps of a consumer (train, eval); awaits: a taken one that lacks groups",
        _TIDY,
        name="ledger",
        required=dict.fromkeys(("taken", "committed", "freed"), _COUNT),
        optional=dict.fromkeys(("keep", "slice", "forgotten", "exported", "awaits"), _COUNT),
    ),
    "batch:<name>:<step>": KeyRow(
        "LIST", "the manifest of one taken batch, a header first", _TIDY, name="batch"
    ),
    # workers
    "workers": KeyRow("ZSET", "worker by last heartbeat (ms of the server's clock)", saved=False),
    "worker:<id>": KeyRow(
        "HASH",
        "engine, weights, state, acknowledged epoch, counters",
        saved=False,
        name="worker_record",
    ),
    "leased:<id>": KeyRow(
        "HASH",
        "what the worker's registration holds: token by gid, and `digest` of them all "
        "(`buffer/lua/shared/workers.lua`); exists while it holds a group",
        saved=False,
        name="leased",
    ),
    "tokens:<id>": KeyRow(
        "HASH",
        "sampled tokens of a worker's process, `nonce`: by task, how many it reported and how many "
        "of these are in groups or rows (`buffer/lua/shared/tokens.lua`)",
        saved=False,
        name="worker_tokens",
        optional={"nonce": _TOKEN},
        others=rf"{_COUNT}( {_COUNT})?",
    ),
    "bad_submissions": KeyRow(
        "HASH",
        '"since_ms bad barred_ms" by worker: number of submitted groups that no trainer can use, '
        "and since when it may not claim (0: it may)",
        _NONE,
        saved=False,
    ),
    # judges
    "verdicts": KeyRow(
        "HASH", "what judges said, by digests of what they read, and `bytes`", _WORKER, saved=False
    ),
    "verdicts_before": KeyRow("HASH", "the older half of the same", _WORKER, saved=False),
    "judge_use": KeyRow(
        "HASH",
        'by "task process": calls of its judge, those from the cache, prompt and answer tokens',
        _WORKER,
    ),
    # a limit on calls of a service; its keys begin with `rmq-limit:{NAME}:`
    "limit": KeyRow(
        "HASH",
        "a limit on calls, which runs share: when the next may be made, calls in progress, speed "
        "after a refusal, the lowest quota that a caller sets",
        _WORKER,
        saved=False,
    ),
    "limit_queue": KeyRow("ZSET", "its waiting callers by turn", _WORKER, saved=False),
    "limit_turns": KeyRow(
        "HASH", "the next turn of each run and task that uses it", _WORKER, saved=False
    ),
    "limit_callers": KeyRow(
        "ZSET", "its callers by the ends of their leases (ms)", _WORKER, saved=False
    ),
    "limit_caller:<caller>": KeyRow(
        "HASH",
        "permits that a process has got, ended and still wants for a task",
        _WORKER,
        saved=False,
    ),
    # weights
    "weights": KeyRow(
        "LIST",
        '"lineage:version" of what is in Redis, the oldest first '
        '([policy] weights_transport = "redis")',
        _NONE,
        saved=False,
    ),
    "weights:<lineage>:<version>": KeyRow(
        "STRING",
        "manifest of one; its files in chunks: …:<version>:1, :2 …",
        _NONE,
        saved=False,
        name="weights_manifest",
    ),
}
"""Every key by what follows `rmq:{run}:`, where `{run}` is a cluster hash tag: one slot for all."""

OF_A_STAGE: Mapping[str, Forms] = {
    "waiting": {"lane": LANE, "entry": r"\d+-\d+"},
    "running": {"lane": LANE, "token": _TOKEN, "owner": _NAME, "claimed_ms": _COUNT},
    "pool": {"arrival": r"\d{10,}"},
    "taken": {"arrival": r"\d{10,}", "batch": r"(train|eval):\d+"},
}
"""Further fields of a group's record, by its stage."""

_BY_FORM = {(name.partition(":")[0], ":" in name): row for name, row in TABLE.items()}


def row_of(key: str) -> KeyRow | None:
    """Return the row of a key of any run; None if no kind of key has this form.

    Of the three kinds of `ended`, it returns one.
    """
    first, colon, _ = key.partition("}:")[2].partition(":")
    return _BY_FORM.get((first, bool(colon)))
