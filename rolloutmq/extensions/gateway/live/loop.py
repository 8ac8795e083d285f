"""An agent loop whose agents are programs elsewhere: it only waits for their rewards."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from typing import Any

from buffer.errors import ConfigError
from buffer.run.run import Run
from buffer.wire.group import LIVE_OPENING
from buffer.wire.rollout import RolloutState
from producer_workers.agent_loops.agent_loop import AgentLoop, Vacancy
from producer_workers.config.producing import ProducingConfig
from producer_workers.engines.base import Engine
from rolloutmq.extensions.gateway.agents import Begin, Earned
from rolloutmq.extensions.gateway.kept_turns import Keeper, TurnWriter, write_opening
from rolloutmq.extensions.gateway.live.room import LiveGroup, LiveRoom
from rolloutmq.extensions.gateway.live.secret import Secret
from rolloutmq.extensions.gateway.live.server import LiveGateway
from rolloutmq.extensions.gateway.loop import GatewayAgentLoop
from rolloutmq.extensions.gateway.section import section_of
from rolloutmq.extensions.gateway.session_record import SessionRecord


class LiveAgent:
    """The program that has a session's key. Its reward ends the session."""

    resumable = True

    def __init__(self, room: LiveRoom) -> None:
        self._room = room

    async def run(self, begin: Begin) -> Earned:
        return await self._room.earned(begin())

    def close(self) -> None: ...


class LiveAgentLoop(GatewayAgentLoop):
    """Opens a group when a program wants one, and waits for the rewards of all its sessions."""

    answers_again = True  # the gateway may have died before it answered

    claims_on_demand = True
    command = "gateway"

    def __init__(self, *, gateway: LiveGateway, **given: Any) -> None:
        if not given.get("partial_rollout"):
            raise ConfigError(
                "live sessions need partial rollout: they outlive pauses and gateways",
                hint="set enable_partial_rollout = true in the task's strategy",
            )
        self._room = gateway.room
        self._address = gateway.address
        super().__init__(gateway=gateway, agent=LiveAgent(gateway.room), **given)

    @classmethod
    def of_worker(
        cls, config: ProducingConfig, run: Run, tasks: Collection[str], **given: Any
    ) -> AgentLoop:
        section = section_of(config)
        if section.key_file is None:
            hint = 'set [gateway] key_file = "sessions.key": the file is made if it is missing'
            raise ConfigError("live sessions need a key that opens them", hint=hint)
        room = LiveRoom(Secret.read(section.key_file, run.nonce), section.session_ttl_s)
        return cls(gateway=LiveGateway.shared(section, room, run, tuple(tasks)), **given)

    async def open(self) -> None:
        await super().open()
        self._room.on_demand = self.claim_soon
        self.facts = self._address()

    def limit_claim(self, vacancy: Vacancy, held: int) -> Vacancy:
        return self._room.limit_claim(vacancy, held)

    async def generate_group(
        self, states: list[RolloutState], engine: Engine, gid: str, keeper: Keeper | None = None
    ) -> list[RolloutState]:
        assert keeper
        group = self._room.groups[gid] = LiveGroup(gid, states, self._trains_all)
        group.opening = SessionRecord(states[0].extra).opening
        try:
            taker = None if group.opening else await self._room.offered(group)
            if taker:
                opening: dict[str, Any] = {"nonce": secrets.token_hex(8), "at_s": time.time()}
                write_opening(keeper, states[0].index, opening)
                await keeper.stored()
                for state in states:
                    state.extra = {**state.extra, LIVE_OPENING: opening}
                group.opening = opening
                if not taker.done():
                    taker.set_result(group)
            assert group.opening
            at_s = group.opening["at_s"]
            made = await super().generate_group(states, engine, gid, keeper)
            if group.opening["at_s"] > at_s + 1.0:  # its calls have waited for a quota
                write_opening(keeper, states[0].index, group.opening)
                await keeper.stored()
            return made
        finally:
            self._room.leave(group)

    def _key(self, state: RolloutState, gid: str) -> str:
        return self._room.secret.key_of(self._room.name(self._room.groups[gid], state.index))

    async def _ended(
        self, state: RolloutState, writer: TurnWriter | None, cut: list[str], earned: Earned
    ) -> None:
        await super()._ended(state, writer, cut, earned)
        assert writer
        assert state.session_id
        await writer.stored()
        self._room.seat_of(state.session_id).settle(is_kept=True)

    def interrupt(self) -> None:
        """End all sessions here: the run pauses, or this process leaves."""
        self._room.interrupt()
        self._gateway.interrupt()
