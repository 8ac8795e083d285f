"""What browsers read of groups and rollouts.

GET /api/groups          ?where=JSON&order=-tokens&page=1&text=WORDS, see buffer/query
GET /api/groups/{gid}    one group with its tokens, or with its sample where it has ended;
                         ?step=50: with its sample of that step
GET /api/samples         ?step=50 (default: the newest) or ?text=WORDS: the sample log
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from buffer.errors import AccountError, ConfigError, PayloadMissing, WireError
from buffer.query.record import GroupRecord
from buffer.run import Run
from buffer.wire.group_json import group_json
from consumer.grpo.reporting.sample_log import Sample, SampleLog, TokenTexts, add_texts, contains
from rolloutmq.options import read_where
from rolloutmq.views.found_group import FoundGroup, find_group, locate, payload_of
from rolloutmq.web.access import Access, number_in

PAGE = 50
MOST_PAGES = 200
MOST_READ = 500  # groups whose payloads are read for one search of their texts


class GroupRoutes:
    def __init__(self, run: Run, texts: TokenTexts, samples: SampleLog | None) -> None:
        self._run = run
        self._texts = texts
        self._samples = samples

    def all(self, access: Access) -> list[Route]:
        return [
            access.reading("/api/groups", self._groups),
            access.reading("/api/groups/{gid}", self._group),
            access.reading("/api/samples", self._logged),
        ]

    def _groups(self, request: Request) -> Any:
        query: Mapping[str, str] = request.query_params
        where = read_where(query.get("where"))
        page = number_in(query.get("page") or "1", MOST_PAGES)
        text = query.get("text") or ""
        order = query.get("order") or ""
        limit = MOST_READ if text else page * PAGE + 1
        found = self._run.groups.find(where, limit=limit, order=order)
        rows = self._with_text(found, text) if text else (asdict(row) for row in found)
        shown = list(islice(rows, (page - 1) * PAGE, page * PAGE + 1))
        return {"groups": shown[:PAGE], "has_more": len(shown) > PAGE, "most_read": MOST_READ}

    def _with_text(self, found: Iterator[GroupRecord], text: str) -> Iterator[dict[str, Any]]:
        """Yield the groups whose texts contain `text`, with the surrounding words."""
        for row in found:
            record = self._run.record(row.gid)
            try:
                group = self._run.buffer.read(payload_of(row.gid, record)) if record else None
            except (PayloadMissing, WireError):  # it has ended since, or `fsck` reports it
                continue
            if group and (excerpt := contains(group_json(group, tokens=False), text)):
                yield asdict(row) | {"excerpt": excerpt}

    def _group(self, request: Request) -> Any:
        gid = request.path_params["gid"]
        step = request.query_params.get("step")
        if step and (sample := self._sample(gid, number_in(step, 10**9))):
            return self._place(gid).with_sample(sample).document(tokens=True)
        found = find_group(self._run, gid, self._samples)
        document = found.document(tokens=True)
        if found.group:
            add_texts(document, found.group, self._texts)
            for member in document["members"]:
                member["token_texts"] = self._texts.of(member["response_ids"])
        return document

    def _place(self, gid: str) -> FoundGroup:
        """Locate a group; return no place if the server has lost it or is another one."""
        try:
            return locate(self._run, gid)
        except (ConfigError, AccountError):
            return FoundGroup(gid, "", [], {})

    def _sample(self, gid: str, step: int) -> Sample | None:
        samples = self._samples.read(step) if self._samples else []
        return next((sample for sample in samples if sample["gid"] == gid), None)

    def _logged(self, request: Request) -> Any:
        return logged_samples(self._samples, request)


def logged_samples(log: SampleLog | None, request: Request) -> Any:
    steps = log.steps() if log else None
    if log is None or steps is None:
        return {"steps": None, "step": None, "groups": []}
    if text := request.query_params.get("text"):
        groups = [
            sample | {"excerpt": contains(sample, text)}
            for sample in islice(log.search(text), PAGE)
        ]
        return {"steps": steps, "step": None, "groups": groups}
    step = number_in(request.query_params.get("step") or str(steps[1]), 10**9)
    return {"steps": steps, "step": step, "groups": log.read(step)}
