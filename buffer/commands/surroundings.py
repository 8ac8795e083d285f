"""What keeps a run from going on and is not in its snapshot: its judge queue, its weights' folder, its newest letter.

Each look may fail by itself (a user without the right, a folder of another machine), and then says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from buffer.commands.diagnosis import Symptom
from buffer.commands.screen import plural
from buffer.errors import StoreError, WireError
from buffer.run import Run
from buffer.watch.snapshot import Snapshot
from buffer.weights import manifest as weights_manifest


def look_around(run: Run, snap: Snapshot) -> list[Symptom]:
    """Symptoms of `run` that `diagnose` cannot know."""
    return [*_judges(run, snap), *_weights(snap), *_newest_letter(run, snap)]


def _judges(run: Run, snap: Snapshot) -> Iterator[Symptom]:
    """rq's own keys: `rolloutmq judge` makes them on the run's server, unless [judges] redis_url names another."""
    queue, raw = f"rmq-judge:{run.name}", run.store.control
    try:
        waiting, oldest = raw.llen(f"rq:queue:{queue}"), raw.lindex(f"rq:queue:{queue}", 0)
        # who was killed stays in the set; its own key runs out
        alive = sum(raw.exists(worker) for worker in raw.smembers(f"rq:workers:{queue}"))
        began: Any = raw.hget(f"rq:job:{oldest.decode()}", "enqueued_at") if oldest else None
    except (NoPermissionError, ResponseError):
        return
    if waiting and not alive:
        what = f"{plural(waiting, 'rollout')} waiting to be judged, and no judge is alive"
        since = snap.now_ms - int(datetime.fromisoformat(began.decode()).timestamp() * 1000) if began else None
        yield Symptom("stuck", what, since, "`rolloutmq judge CONFIG`")


def _weights(snap: Snapshot) -> Iterator[Symptom]:
    """A folder that is here, but not what was published. What lies elsewhere, workers must see for themselves."""
    folder, checksum = Path(snap.control.get("weights_path", "")), snap.control.get("weights_checksum", "")
    if not checksum or not folder.is_dir():
        return
    try:
        weights_manifest.check_sizes(folder, checksum)
    except (OSError, WireError) as error:
        what = f"the weights {snap.weights} in {folder} are torn: {error}"
        yield Symptom("stuck", what, None, "start the trainer again: it publishes them anew from its checkpoint")


def _newest_letter(run: Run, snap: Snapshot) -> Iterator[Symptom]:
    if not snap.dead:
        return
    try:
        letters = list(islice(run.dead_letters.newest(), 1))
    except StoreError:
        return
    for letter in letters:
        what = f"the newest dead letter is {letter.gid}: {letter.reason:.200}"
        yield Symptom("note", what, letter.age_ms, "mend that, then `rolloutmq requeue`, or `rolloutmq drop`")
