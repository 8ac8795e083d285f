from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from buffer.errors import LostRun
from buffer.maintenance.remove_run import remove_run
from buffer.redis.bulk_io import Command
from buffer.redis.scripts import Script, library
from buffer.weights.copies import CopySender
from buffer.weights.redis_chunks import VersionStore
from tests.buffer.scene import FIRST, Scene
from tests.buffer.whole_story import save_weights, tell_a_whole_story

OPENING = {"create_run", "regenerate", "register", "producer_open", "trainer_open", "set_limits"}
"""They say themselves that there is no run, or make one."""


@pytest.fixture
def last_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Command]:
    made: dict[str, Command] = {}
    command = Script.command

    def recorded(self: Script, *parts: Any) -> Command:
        made[self.name] = command(self, *parts)
        return made[self.name]

    monkeypatch.setattr(Script, "command", recorded)
    return made


@pytest.mark.parametrize("is_over", [True, False])
def test_a_call_of_any_script_for_a_removed_run_changes_nothing_and_says_so(
    make_scene: Callable[..., Scene], last_calls: dict[str, Command], tmp_path: Path, is_over: bool
) -> None:
    scene = make_scene(max_tries=2, on_straggler="retry", order="fifo")
    tell_a_whole_story(scene, tmp_path)
    scene.run.store.call("sync", scene.keys.slots(), {})
    store, keys = scene.run.store, scene.keys
    if is_over:
        remove_run(store, keys)
    else:
        store.ask("test", "HSET", keys.meta, "schema", "removing")
    before = scene.dump()
    writing = {name for name, script in library().items() if script.header.writes}
    # while it is removed, only `regenerate` may go on with it
    refused = writing - (OPENING if is_over else {"regenerate"})
    for name in (OPENING - {"create_run", "regenerate"}) if is_over else ():
        assert store.client.execute_command(*last_calls[name])[0] in (b"NO_RUN", b"LOST")
    for name in sorted(refused):
        call = partial(store.client.execute_command, *last_calls[name])
        with pytest.raises(LostRun, match=f"removed.*{name}: there is no {re.escape(keys.meta)}"):
            store.retrying(name, call)
    assert scene.dump() == before
    with pytest.raises(LostRun):
        CopySender(VersionStore(store, keys), tmp_path).write(FIRST, save_weights)
    assert scene.dump().items() <= before.items(), "an older attempt is deleted first"


def test_weights_of_a_run_that_is_removed_while_they_are_stored_leave_nothing(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, send = scene.run.store, scene.run.store.send

    def remove(what: str, *given: Any, **options: Any) -> Any:
        if what == "weights":
            remove_run(store, scene.keys)
        return send(what, *given, **options)

    monkeypatch.setattr(store, "send", remove)
    with pytest.raises(LostRun):
        CopySender(VersionStore(store, scene.keys), tmp_path).write(FIRST, save_weights)
    assert scene.dump() == {}
