"""Open sessions over HTTP, and take their rewards; a key that is not here may come back.

POST /sessions               admin key; {"task": "chat", "wait_s": 30}   one key per rollout
POST /sessions/KEY/reward    {"score": 1.0}                              ends the session
                             {"skip": "reason"}                          ends its group (`Skip`)
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web

from buffer.errors import Skip, UserCodeError, WireError
from buffer.ids import split_group_id
from buffer.run.record import read_hash
from buffer.run.run import Run
from buffer.wire.foreign_json import read_json
from buffer.wire.rollout import RolloutState, has_ended
from rolloutmq.extensions.gateway.agent_rollouts import ended_rollouts
from rolloutmq.extensions.gateway.agent_sessions import AgentSessions
from rolloutmq.extensions.gateway.agents import AGENT, AgentTask, Earned
from rolloutmq.extensions.gateway.dialects.dialect import AgentRequest
from rolloutmq.extensions.gateway.guests import Guest, Refusal
from rolloutmq.extensions.gateway.live.room import LiveGroup, LiveRoom, Seat
from rolloutmq.extensions.gateway.live.secret import SessionName
from rolloutmq.extensions.gateway.section import GatewaySection
from rolloutmq.extensions.gateway.server import REPLY, Gateway, body_of, given_keys
from rolloutmq.extensions.gateway.session_record import SessionRecord, without_record

MOVE_S = 60.0  # how long a request waits for its session, during a pause or after a death
LOOK_S = 2.0  # between two looks at the server: another gateway may have ended the session

_ADDRESS = "gateway"  # a fact of a worker: the URL at which it serves live sessions


class SessionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /sessions. `task` may be left out if there is one."""

    task: str = ""
    wait_s: float = 30.0


class LiveGateway(Gateway):
    """The gateway of a process that serves the live `tasks` of a run."""

    def __init__(
        self, section: GatewaySection, room: LiveRoom, run: Run, tasks: tuple[str, ...]
    ) -> None:
        super().__init__(section)
        self.room = room
        self._run = run
        self._tasks = tasks
        self._moved = asyncio.Event()  # of the next move

    def address(self) -> dict[str, str]:
        """Return the fact with which the worker of a started gateway tells others where it is."""
        return {_ADDRESS: self.url.removesuffix("/v1")}

    def admit(self, sessions: AgentSessions, key: str = "") -> str:
        key = super().admit(sessions, key)
        self._tell_moved()
        return key

    def dismiss(self, key: str) -> None:
        super().dismiss(key)
        self._tell_moved()

    def _tell_moved(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        reward = web.post("/sessions/{key}/reward", self._reward)
        return [web.post("/sessions", self._open), reward, *super().routes()]

    async def _open(self, request: web.Request) -> web.Response:
        if not any(map(self.room.secret.is_admin, given_keys(request))):
            self.refuse_key()
        try:
            given = read_json(await body_of(request) or b"{}", "the body")
            wanted = msgspec.convert(given, SessionRequest)
        except (WireError, msgspec.ValidationError) as error:
            raise Refusal(400, str(error), "refused") from error
        task = wanted.task or self._tasks[0]
        if task not in self._tasks or (not wanted.task and len(self._tasks) > 1):
            known = ", ".join(self._tasks)
            raise Refusal(400, f"task: there is no live task {task!r}; known: {known}", "refused")
        try:
            group = await self.room.take(task, min(max(wanted.wait_s, 0.0), 600.0))
        except TimeoutError as error:
            why = (
                f"no group of {task} can start now: the run pauses, is full, or has no room for it"
            )
            raise Refusal(503, why, "moved") from error
        tasks = [group.tasks[index] for index in sorted(group.tasks)]
        assert group.opening
        return web.json_response(
            {
                "group": group.gid,
                "ends_at_s": group.opening["at_s"] + self.room.ttl_s,
                "sessions": [_shown(each) for each in tasks],
            }
        )

    async def _reward(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        name = self.room.secret.name_of(key) or self.refuse_key()
        try:
            earned = AGENT.check("the reward", read_json(await body_of(request), "the body")) or {}
        except (WireError, UserCodeError) as error:
            raise Refusal(400, str(error), "refused") from error
        except Skip as skip:
            return await self._skip(request, key, name, skip)
        seat = self._seat(name)
        if not (seat and seat.has_reward):
            guest = self.guest_of(key) or await self._absent(key, request) or self.refuse_key()
            _check(guest, earned, self.room.groups[name.gid])
            seat = self._seat(name)
            if seat and not seat.earned.done():
                seat.earned.set_result(earned)
        if seat and seat.has_reward:
            if seat.earned.result() != earned:
                raise Refusal(409, "this session has ended with another reward", "session_ended")
            await seat.settled.wait()
            if seat.is_kept:
                return web.json_response({"status": "ended"})
        raise Refusal(503, "this session moves; send the reward again", "moved")

    async def _skip(
        self, request: web.Request, key: str, name: SessionName, skip: Skip
    ) -> web.Response:
        """End the group of a session; answer once the server has it among those skipped."""
        self.guest_of(key) or await self._absent(key, request) or self.refuse_key()
        until = time.monotonic() + MOVE_S
        draw, stages = split_group_id(name.gid), [""]
        while stages != ["skipped"]:
            if time.monotonic() > until:
                raise Refusal(503, "this session moves; send the skip again", "moved")
            if (seat := self._seat(name)) and not seat.earned.done():
                seat.earned.set_exception(skip)
            await asyncio.sleep(0.05)  # until the group is released
            stages = await asyncio.to_thread(self._run.account.stages, *draw)
        return web.json_response({"status": "ended"})

    def _seat(self, name: SessionName) -> Seat | None:
        group = self.room.groups.get(name.gid)
        is_open = group and group.opening and group.opening["nonce"] == name.opening
        return group.seats[name.rollout] if group and is_open else None

    # -- sessions that are not here

    async def _absent(self, key: str, request: web.Request) -> Guest | None:
        """Wait for the session of a key that is not served here. Raises Refusal.

        Where another living gateway has it, the client is sent there, with its key in the path:
        clients leave out their headers with keys when they follow a redirect.
        """
        name = self.room.secret.name_of(key)
        if name is None:
            return None
        until = time.monotonic() + MOVE_S
        while not (guest := self.guest_of(key)):
            moved = self._moved
            if url := await self._place_of(name):
                given = next(each for each in given_keys(request) if each.startswith(key))
                in_path = "key" in request.match_info
                where = url + ("" if in_path else f"/sessions/{quote(given, safe='')}")
                why = f"this session is at {url}"
                raise Refusal(307, why, "moved", location=where + request.raw_path)
            if time.monotonic() > until:
                raise Refusal(503, "this session is not at this gateway; ask again", "moved")
            await _wait(moved)
        return guest

    async def _place_of(self, name: SessionName) -> str:
        """Return the URL of another living gateway that has a session, or "".

        Raises Refusal if the session has ended.
        """
        group = self.room.groups.get(name.gid)
        if group and group.opening:
            own = [state for state in group.states if state.index == name.rollout]
            seat = self._seat(name)
            if seat is None or seat.has_reward or all(map(has_ended, own)):
                raise Refusal(410, "this session has ended", "session_ended")
            return ""
        record = await asyncio.to_thread(self._run.record, name.gid)
        stage, status = record.get("stage"), record.get("status")
        if not stage:
            stages = await asyncio.to_thread(self._run.account.stages, *split_group_id(name.gid))
            raise Refusal(410, f"this session has ended: its group is {stages[0]}", "session_ended")
        # they never come back to their programs
        if stage in ("taken", "dead") or (stage == "pool" and status == "completed"):
            raise Refusal(410, f"this session has ended: its group is {status}", "session_ended")
        if stage != "running":
            return ""
        run, owner = self._run, record["owner"]
        facts = await asyncio.to_thread(read_hash, run.store, "worker", run.keys.worker(owner))
        url = facts.get(_ADDRESS, "")
        is_other = re.fullmatch(r"https?://[^\s?#]+", url) and url != self.address()[_ADDRESS]
        return url if is_other and await _answers(url) else ""

    async def _serve(self, kind: type[AgentRequest], request: web.Request) -> web.StreamResponse:
        """Answer a request, after the pause that interrupts it."""
        until = time.monotonic() + MOVE_S
        while True:
            moved = self._moved
            try:
                return await super()._serve(kind, request)
            except Refusal as refusal:
                has_begun = REPLY in request and request[REPLY].has_begun
                if refusal.code != "interrupted" or has_begun:
                    raise
                if time.monotonic() > until:
                    raise Refusal(503, "this session is interrupted", "moved") from refusal
            await _wait(moved)


async def _answers(url: str) -> bool:
    """Return whether a gateway is there: one that died is in the server's books for a lease."""
    timeout = aiohttp.ClientTimeout(total=LOOK_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.get(url, allow_redirects=False, ssl=False),  # nothing is told, and nothing read
        ):
            return True
    except (OSError, aiohttp.ClientError, TimeoutError):
        return False


async def _wait(moved: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(moved.wait(), LOOK_S)


def _shown(task: AgentTask) -> dict[str, Any]:
    return {
        "key": task.api_key,
        "openai_base_url": task.base_url,
        "anthropic_base_url": task.anthropic_url,
        "reward_url": f"{task.anthropic_url}/sessions/{task.api_key}/reward",
        "messages": task.messages,
        "data_source": task.data_source,
        "extra": without_record(task.extra),
    }


def _check(guest: Guest, earned: Earned, group: LiveGroup) -> None:
    """Raise Refusal if the sessions of a key cannot have these rewards."""
    segments = guest.sessions.segments()
    if not segments:
        raise Refusal(409, "the model has said nothing in this session", "refused")
    try:
        state = RolloutState(index=0, messages=group.states[0].messages)
        record = SessionRecord({})  # of nobody
        ended_rollouts(state, segments, [], earned, record, trains_all=group.trains_all)
    except WireError as error:
        raise Refusal(400, str(error), "refused") from error
