"""A gateway process for tests that kill it; its URL is in a file of its folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

from buffer.redis.store import Store
from buffer.run.run import Run
from producer_workers.worker.task_runner import TaskRunner
from producer_workers.worker.worker import Worker
from rolloutmq.extensions.gateway.live.loop import LiveAgentLoop
from rolloutmq.extensions.gateway.live.room import LiveRoom
from rolloutmq.extensions.gateway.live.secret import Secret
from rolloutmq.extensions.gateway.live.server import LiveGateway
from rolloutmq.extensions.gateway.section import GatewaySection
from rolloutmq.extensions.gateway.session import Session
from rolloutmq.testing import END, Characters
from tests.pipeline.talker import Mortal, start_engine
from tests.pipeline.yard import TASK


def note_kept_turns(mortal: Mortal) -> None:
    stored = Session.stored

    async def stored_and_noted(session: Session) -> None:
        await stored(session)
        mortal.note("kept", session.name)

    Session.stored = stored_and_noted  # type: ignore[assignment, method-assign]


async def serve(url: str, name: str, worker: str, folder: str, ttl_s: str, death: str) -> None:
    """`death`: see `tests.pipeline.talker`; "kept N": turn N is kept, and not answered yet."""
    mortal = Mortal(Path(folder), death)
    note_kept_turns(mortal)
    run = Run.open(Store(url), name)
    room = LiveRoom(Secret.read(Path(folder) / "key", run.nonce), float(ttl_s))
    gateway = LiveGateway(GatewaySection(), room, run, (TASK,))
    loop = LiveAgentLoop(
        judge=None, tokenizer=Characters(), eos_ids={END}, partial_rollout=True, parser="",
        gateway=gateway,
    )  # fmt: skip
    engine = await start_engine(mortal)
    runners = {TASK: TaskRunner(loop, partial_rollout=True)}
    member = Worker(run, engine, runners, worker_id=worker)
    await gateway.start()
    part = Path(folder) / f"{worker}.part"
    part.write_text(gateway.url.removesuffix("/v1"))
    part.replace(Path(folder) / worker)
    await member.run()


def live(*words: str) -> None:
    asyncio.run(serve(*words))
