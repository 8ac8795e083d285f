"""What browsers read of groups and rollouts.

GET /api/groups          ?where=JSON&order=-tokens&page=1 (buffer/query) &text=WORDS
                         &outcome=dead&cause=… (rolloutmq/views/group_list.py)
GET /api/groups/{gid}    one group with its tokens, or with its sample where it has ended;
                         ?step=50: with its sample of that step
GET /api/samples         ?step=50 (default: the newest), or of all steps ?text=WORDS&why=worst
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from buffer.errors import AccountError, ConfigError
from buffer.run import Run
from consumer.grpo.reporting.sample_log import Sample, SampleLog, TokenTexts, add_texts, contains
from rolloutmq.options import read_where, require_known
from rolloutmq.views.found_group import FoundGroup, find_group, locate
from rolloutmq.views.group_list import MOST_READ, OUTCOMES, Wanted, list_groups
from rolloutmq.web.access import Access, number_in

PAGE = 25
MOST_PAGES = 400


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
        page = number_in(query.get("page") or "1", MOST_PAGES)
        require_known("outcome", query.get("outcome") or "completed", OUTCOMES)
        named = {name: query.get(name) or "" for name in ("order", "outcome", "cause", "text")}
        wanted = Wanted(read_where(query.get("where")), **named)
        rows = list_groups(self._run, self._texts, wanted, (page - 1) * PAGE, PAGE + 1)
        return {
            "groups": rows[:PAGE],
            "has_more": len(rows) > PAGE,
            "most_read": MOST_READ if wanted.reads_contents else None,
        }

    def _group(self, request: Request) -> Any:
        gid = request.path_params["gid"]
        step = request.query_params.get("step")
        if step and (sample := self._sample(gid, number_in(step, 10**9))):
            return replace(self._place(gid), sample=sample).document(tokens=True)
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
            return FoundGroup(gid)

    def _sample(self, gid: str, step: int) -> Sample | None:
        samples = self._samples.read(step) if self._samples else []
        return next((sample for sample in samples if sample["gid"] == gid), None)

    def _logged(self, request: Request) -> Any:
        return logged_samples(self._samples, request)


def logged_samples(log: SampleLog | None, request: Request) -> Any:
    steps = log.steps() if log else None
    if log is None or steps is None:
        return {"steps": None, "step": None, "groups": []}
    text, why = (request.query_params.get(name) or "" for name in ("text", "why"))
    if text or why:
        found = islice(log.search(text, why), PAGE)
        groups = [sample | {"excerpt": text and contains(sample, text)} for sample in found]
        return {"steps": steps, "step": None, "groups": groups}
    step = number_in(request.query_params.get("step") or str(steps[1]), 10**9)
    return {"steps": steps, "step": step, "groups": log.read(step)}
