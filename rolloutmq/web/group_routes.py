"""What browsers read of groups and rollouts, and what an operator does from a browser.

GET /api/groups          ?where=JSON&order=-tokens&page=1 (buffer/query) &text=WORDS
                         &outcome=dead&cause=… (rolloutmq/views/group_list.py)
GET /api/groups/{gid}    one group with its tokens, or with its sample where it has ended;
                         ?step=50: with its sample of that step
GET /api/samples         ?step=50 (default: the newest), or of all steps ?text=WORDS&why=worst
GET /api/settings        what `rolloutmq set` can change, with values and ranges
GET /api/workers/{worker}/events  the newest events that name a worker
GET /api/dead            the newest dead letters, grouped by cause
POST /api/pause?mode=drain|abort|keep  /api/resume
POST /api/settings?name=NAME&value=VALUE
POST /api/tasks/{task}/resume  /api/workers/{worker}/admit
POST /api/groups/{gid}/requeue  /api/groups/{gid}/drop
POST /api/dead/requeue  /api/dead/drop  ?cause=…: all letters of that cause
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from buffer.control.control import Mode
from buffer.errors import AccountError, ConfigError
from buffer.groups.dead_letters import DeadLetter
from buffer.run.run import Run
from buffer.run.settings import parse_change
from consumer.handle.sample_log import Sample, SampleLog, TokenTexts, add_texts, contains
from rolloutmq.options import read_where, require_known
from rolloutmq.views.found_group import FoundGroup, find_group, locate
from rolloutmq.views.group_list import MOST_READ, OUTCOMES, Wanted, list_groups
from rolloutmq.views.run_folder import letters_by_cause
from rolloutmq.views.setting_view import live_settings, set_operator_mode
from rolloutmq.web.access import Access, number_in

PAGE = 25


class GroupRoutes:
    def __init__(self, run: Run, texts: TokenTexts, samples: SampleLog | None) -> None:
        self._run = run
        self._texts = texts
        self._samples = samples

    def all(self, access: Access) -> list[Route]:
        return [
            access.reading("/api/groups", self._groups),
            access.reading("/api/groups/{gid}", self._group),
            access.reading("/api/samples", partial(logged_samples, self._samples)),
        ]

    def _groups(self, request: Request) -> Any:
        query: Mapping[str, str] = request.query_params
        page = number_in(query.get("page") or "1", 400)
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
            try:
                found = locate(self._run, gid)
            except (ConfigError, AccountError):  # the server has lost it, or is another one
                found = FoundGroup(gid)
            return with_token_texts(replace(found, sample=sample), self._texts)
        found = find_group(self._run, gid, self._samples, tokens=True)
        return with_token_texts(found, self._texts)

    def _sample(self, gid: str, step: int) -> Sample | None:
        samples = self._samples.read(step, tokens=True) if self._samples else []
        return next((sample for sample in samples if sample["gid"] == gid), None)


def with_token_texts(found: FoundGroup, texts: TokenTexts) -> dict[str, Any]:
    """Return the document of a group with its tokens, each of which has its text."""
    document = found.document(tokens=True)
    if found.group:
        add_texts(document, found.group, texts)
    for member in document["members"]:
        if "response_ids" in member:
            member["token_texts"] = texts.of(member["response_ids"])
    return document


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


SEARCHED_EVENTS = 5_000  # newest events among which those of one worker are found
MOST_LETTERS = 10_000  # letters that one request reads or moves


class ControlRoutes:
    def __init__(self, run: Run, run_dir: Path | None) -> None:
        self._run = run
        self._run_dir = run_dir

    def all(self, access: Access) -> list[Route]:
        jobs, fleet = self._run.jobs, self._run.fleet
        return [
            access.reading("/api/settings", self._settings),
            access.reading("/api/workers/{worker}/events", self._worker_events),
            access.reading("/api/dead", self._dead),
            access.acting("/api/pause", self._pause),
            access.acting("/api/resume", lambda _: self._hold(Mode.RUN)),
            access.acting("/api/settings", self._set),
            access.acting("/api/tasks/{task}/resume", self._resume_task),
            access.acting(
                "/api/workers/{worker}/admit",
                lambda request: {"bad_groups": fleet.unbar(request.path_params["worker"])},
            ),
            access.acting("/api/groups/{gid}/requeue", _of_group(jobs.requeue)),
            access.acting("/api/groups/{gid}/drop", _of_group(jobs.drop)),
            access.acting("/api/dead/requeue", lambda request: self._move(request, jobs.requeue)),
            access.acting("/api/dead/drop", lambda request: self._move(request, jobs.drop)),
        ]

    def _settings(self, request: Request) -> Any:
        self._run.refresh_limits()
        return [
            asdict(setting) | {"topic": setting.topic}
            for setting in live_settings(self._run.limits, self._run.settings)
        ]

    def _worker_events(self, request: Request) -> Any:
        found = [
            {"at_ms": at_ms, "event": name, **fields}
            for at_ms, name, fields in reversed(self._run.events.last(SEARCHED_EVENTS))
            if fields.get("worker") == request.path_params["worker"]
        ]
        return found[:50]

    def _pause(self, request: Request) -> Any:
        mode = request.query_params.get("mode", "abort")
        require_known("mode", mode, (Mode.ABORT, Mode.DRAIN, Mode.KEEP))
        return self._hold(Mode(mode))

    def _hold(self, mode: Mode) -> Any:
        said: list[str] = []
        state, _ = set_operator_mode(self._run, mode, said.append)
        return {"epoch": state.epoch, "said": said}

    def _set(self, request: Request) -> Any:
        query = request.query_params
        assignment = f"{query.get('name', '')}={query.get('value', '')}"
        wanted, restored = parse_change([assignment])
        changed = self._run.set(wanted, restored=restored, by="a browser", folder=self._run_dir)
        return {"changed": sorted(changed)}

    def _resume_task(self, request: Request) -> Any:
        task = request.path_params["task"]
        require_known("task", task, self._run.limits.tasks)
        self._run.jobs.resume_task(task)
        return {"task": task}

    # -- dead letters ----------------------------------------------------------

    def _letters(self) -> list[DeadLetter]:
        return list(islice(self._run.dead_letters.newest(), MOST_LETTERS))

    def _dead(self, request: Request) -> Any:
        return letters_by_cause(self._letters(), len(self._run.dead_letters))

    def _move(self, request: Request, move: Callable[[str], str]) -> Any:
        """Move all letters of a cause; skip those that are no longer dead."""
        cause = request.query_params.get("cause")
        if cause is None:
            raise ConfigError("name a cause", hint="GET /api/dead lists them")
        moved = refused = 0
        for letter in self._letters():
            if letter.cause != cause:
                continue
            try:
                move(letter.gid)
                moved += 1
            except AccountError:
                # another operator was quicker
                refused += 1
        return {"moved": moved, "refused": refused}


def _of_group(move: Callable[[str], str]) -> Callable[[Request], Any]:
    return lambda request: {"before": move(request.path_params["gid"])}
