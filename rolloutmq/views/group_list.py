"""List groups with what is seen of each at a glance: first lines, scores and lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any, NamedTuple

from buffer.errors import PayloadMissing, WireError
from buffer.groups.record_walk import payload_of
from buffer.query.record import GroupRecord
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from buffer.wire.group_json import group_json
from consumer.handle.sample_log import TokenTexts, contains

MOST_READ = 500  # groups whose payloads are read for one search of their contents
MOST_EVENTS = 20_000  # newest events among which filtered groups are found

OUTCOMES: Mapping[str, Mapping[str, Any]] = {
    "completed": {"status": "completed"},
    "truncated": {"stage": {"$in": ["pool", "taken"]}},
    "aborted": {"status": "aborted"},
    "expired": {"status": "expired"},
    "filtered": {},
    "skipped": {},
    "dead": {"stage": "dead"},
}
"""Outcomes by which a list is filtered, and the queries that contain their groups."""


class Wanted(NamedTuple):
    """The groups that a list has.

    `where`: a query. `outcome`: a key of `OUTCOMES`. `cause`: a `DeadLetter.cause`. `text`: words
    in prompts and responses.
    """

    where: Mapping[str, Any]
    order: str = ""
    outcome: str = ""
    cause: str = ""
    text: str = ""

    @property
    def reads_contents(self) -> bool:
        return bool(self.text) or self.outcome == "truncated"


def list_groups(
    run: Run, texts: TokenTexts, wanted: Wanted, first: int, count: int
) -> list[dict[str, Any]]:
    """Return up to `count` groups after the `first` ones that match."""
    if wanted.outcome == "filtered":
        return list(islice(_filtered(run), first, first + count))
    if wanted.outcome == "skipped":
        skips = islice(run.skips.newest(), first, first + count)
        return [asdict(each) | {"status": "skipped", "tokens": None} for each in skips]
    parts = [wanted.where, OUTCOMES.get(wanted.outcome, {})]
    if wanted.cause:
        letters = islice(run.dead_letters.newest(), 10_000)
        gids = [letter.gid for letter in letters if letter.cause == wanted.cause]
        parts.append({"gid": {"$in": gids}})
    query = {"$and": parts}
    if wanted.reads_contents:
        found = run.groups.find(query, limit=MOST_READ, order=wanted.order)
        rows = (row for record in found if (row := _matching(run, record, wanted, texts)))
        return list(islice(rows, first, first + count))
    found = run.groups.find(query, limit=first + count, order=wanted.order)
    return [_row(run, record, _read(run, record), texts) for record in islice(found, first, None)]


def _filtered(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the filtered groups that the event log still names, newest first."""
    for at_ms, name, fields in reversed(run.events.last(MOST_EVENTS)):
        if name == "filtered":
            facts = {"tokens": int(fields["tokens"]), "version": fields["version"] or None}
            yield {"gid": fields["gid"], "status": name, "at_ms": at_ms, **facts}


def _matching(
    run: Run, record: GroupRecord, wanted: Wanted, texts: TokenTexts
) -> dict[str, Any] | None:
    group = _read(run, record)
    if group is None or (wanted.outcome == "truncated" and not group.truncated.any()):
        return None
    excerpt = contains(group_json(group, tokens=False), wanted.text) if wanted.text else ""
    if wanted.text and not excerpt:
        return None
    return _row(run, record, group, texts) | {"excerpt": excerpt}


def _read(run: Run, record: GroupRecord) -> RolloutGroup | None:
    fields = run.record(record.gid)
    try:
        return run.buffer.read(payload_of(record.gid, fields)) if fields else None
    except (PayloadMissing, WireError):  # it has ended since, or `fsck` reports it
        return None


def _row(
    run: Run, record: GroupRecord, group: RolloutGroup | None, texts: TokenTexts
) -> dict[str, Any]:
    row = asdict(record)
    if record.stage == "dead":
        row["reason"] = (run.dead_letters.reason(record.gid) or {}).get("reason", "")
    return row | (outline(group, texts) if group else {})


def outline(group: RolloutGroup, texts: TokenTexts) -> dict[str, Any]:
    """Return the first line of the prompt, and of each response its first line, score, length."""
    columns = (group.head.responses, group.scores, group.lengths, group.truncated)
    responses = [
        {
            "index": index,
            "line": _first_line(text),
            "score": None if math.isnan(score) else float(score),
            "tokens": int(tokens),
            "truncated": bool(is_truncated),
        }
        for index, (text, score, tokens, is_truncated) in enumerate(zip(*columns, strict=True))
        if tokens
    ]
    messages = group.shared.messages
    asked = messages[-1].get("content") if messages else texts.joined(group.prompt_ids.tolist())
    if isinstance(asked, list):  # the content of a message may be a list of parts
        asked = " ".join(str(part.get("text", "")) for part in asked if isinstance(part, dict))
    return {"prompt": _first_line(str(asked or "")), "responses": responses}


def _first_line(text: str) -> str:
    return text.lstrip().removeprefix("<think>").lstrip().partition("\n")[0][:300]
