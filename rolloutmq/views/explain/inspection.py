"""Find what a view of a run does not show: the judge queue, the weights' folder, dead letters.

Each may be inaccessible (missing rights, another machine's folder), and is then left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from redis.exceptions import ResponseError

from buffer.errors import (
    RunError,
    SchemaVersionError,
    StoreError,
    StoreUnavailable,
    WireError,
)
from buffer.failure_text import headline, trace_of
from buffer.groups.dead_letters import by_cause
from buffer.ids import split_group_id
from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.weights import folder_manifest as weights_manifest
from consumer.handle.step_log import TrainedStep, read_steps
from rolloutmq.output import plural
from rolloutmq.views.explain.diagnosis import Symptom, diagnose, fault, note, stuck, worst_first
from rolloutmq.views.explain.shares import STEPS
from rolloutmq.views.explain.who_waited import read_waits
from rolloutmq.views.run_view import RunView, read_run_view

FEW = 20_000  # groups and keys up to which all of a run is checked, within a second or two
FEW_LETTERS = 500  # newest dead letters whose causes are counted
# new contexts that agents ask for
MEANT = ("conversation", "again", "branch", "other_system", "other_tools")
SHOWN = 5  # faults, or causes, that are shown one by one


def diagnose_run(
    store: Store, name: str, find_folder: Callable[[Run], Path | None] = lambda _: None
) -> tuple[RunView | None, list[Symptom]]:
    """Return the snapshot of a run and its symptoms; no snapshot if the run cannot be opened."""
    try:
        run = Run.open(store, name)
        snap = read_run_view(run)
        found = inspect(run, snap, read_steps(find_folder(run)))
        return snap, worst_first([*diagnose(snap), *found])
    except StoreUnavailable:
        raise
    except (RunError, StoreError, SchemaVersionError) as error:
        fix = error.hint or "inspect it with the version that created it"
        return None, [fault(error.message, fix)]


def inspect(run: Run, snap: RunView, steps: Sequence[TrainedStep]) -> list[Symptom]:
    """Return the symptoms of a run that its snapshot does not show; `steps`: the trained ones."""
    found = [*_damage(run, snap), *_contexts(steps)]
    for part in (_judges, _weights, _dead_letters, _stragglers):
        with suppress(StoreError):  # a user who may not read it
            found += part(run, snap)
    with suppress(StoreError):
        if waits := read_waits(run, snap, steps):
            found.append(note(str(waits), waits.advice))
    return found


def _damage(run: Run, snap: RunView) -> Iterator[Symptom]:
    """Report what `fsck` finds: everything in a small run, only cheap checks in a large one."""
    groups = sum(task.account.total for task in snap.tasks)
    databases: Any = run.store.client.info("keyspace")  # DBSIZE is for administrators
    is_small = max(groups, sum(database["keys"] for database in databases.values())) <= FEW
    found = run.account.fsck().damage if is_small else run.account.spot_check()
    texts = [each.text for each in found if each.text not in snap.faults]
    more = [f"{len(texts) - SHOWN} more faults"] if len(texts) > SHOWN else []
    for text in texts[:SHOWN] + more:
        yield fault(text, "`rolloutmq fsck` lists all that is wrong")
    if not is_small:
        what = f"{groups} groups: only the ledger and the newest of them were checked"
        yield note(what, "`rolloutmq fsck` checks them all")


def count_judges(store: Store, keys: Keys) -> tuple[int, int]:
    """Return how many rollouts wait for judges on this server, and how many of these live."""
    raw: Any = store.client
    try:
        waiting = raw.llen(f"rq:queue:{keys.judge_queue}")
        # a judge that was killed stays in the set, but its own key expires
        workers = raw.smembers(f"rq:workers:{keys.judge_queue}")
        return waiting, sum(raw.exists(worker) for worker in workers)
    except ResponseError:  # a user who may not read them, or a cluster, where they have other nodes
        return 0, 0


def _judges(run: Run, _: RunView) -> Iterator[Symptom]:
    """Report rollouts that wait for judges while none lives, from rq's keys on its server."""
    waiting, alive = count_judges(run.store, run.keys)
    if waiting and not alive:
        what = f"{plural(waiting, 'rollout')} waiting to be judged, and no judge is alive"
        yield stuck(what, "`rolloutmq judge CONFIG`")


def _weights(_: Run, snap: RunView) -> Iterator[Symptom]:
    """Report a weights folder with other files than published; workers check remote folders."""
    folder = Path(snap.control.get("weights_path", ""))
    checksum = snap.control.get("weights_checksum", "")
    try:
        if checksum and folder.is_dir():
            weights_manifest.check_sizes(folder, checksum)
    except (OSError, WireError) as error:
        what = f"the weights {snap.weights} in {folder} are incomplete: {error}"
        yield stuck(what, "start the trainer again: it publishes them from its checkpoint")


def _dead_letters(run: Run, snap: RunView) -> Iterator[Symptom]:
    """Report the most frequent causes of the newest dead letters."""
    newest = run.dead_letters.newest() if snap.dead else ()
    left = snap.dead
    for _, letters in by_cause(islice(newest, FEW_LETTERS))[:SHOWN]:
        first, left = letters[0], left - len(letters)
        judged = next((letter.gid for letter in letters if letter.has_responses), None)
        again = f", `rolloutmq rejudge {judged} --pdb` runs its judge again" if judged else ""
        yield note(
            f"{plural(len(letters), 'dead letter')}: {headline(first.reason, 200)}",
            f"`rolloutmq show {judged or first.gid}` shows one{again}; fix the cause, then run "
            "`rolloutmq requeue --all-dead --yes`",
            first.age_ms,
            trace_of(first.reason),
        )
    if left > 0:
        yield note(plural(left, "more dead letter"), "`rolloutmq dead` lists them")


def _stragglers(run: Run, snap: RunView) -> Iterator[Symptom]:
    """Report groups that run, could serve no later step, and so are waited for."""
    step = snap.taken + 1
    for task in snap.training:
        name, cut = task.account.task, step - task.stale_threshold
        is_ready = task.ready >= max(1, task.batch_share) and task.account.running
        if not (is_ready and run.limits.waits_for_stragglers(name)):
            continue
        gids = run.store.ask("stragglers", "ZRANGEBYSCORE", run.keys.age(name), cut, cut)
        late = [*run.groups.find({"gid": {"$in": [gid.decode() for gid in gids]}})]
        if late:
            oldest = max(late, key=lambda record: record.time_ms or 0)
            yield note(
                f"step {step} waits for {plural(len(late), 'group')} of task {name} that began "
                f"{task.stale_threshold} steps ago; {oldest.gid} is with {oldest.owner}",
                f"nothing while it samples; a larger `tasks.{name}.max_staleness` waits less; "
                f"`rolloutmq drop {oldest.gid} --revoke {oldest.owner} --yes` ends one that "
                "hangs, [strategy] group_time_limit_s every such one",
                oldest.time_ms,
            )


def _contexts(steps: Sequence[TrainedStep]) -> Iterator[Symptom]:
    """Report agents whose changes to a conversation make the model read it again."""
    newest = steps[-STEPS:]
    by_task: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for step in newest:
        for metric, count in step.metrics.items():
            name, _, rest = metric.partition("/")
            task, _, why = rest.rpartition("/")
            if name == "new_contexts" and why not in MEANT:
                by_task[task][why] += int(count)
    for task, reasons in by_task.items():
        groups = sum(split_group_id(gid)[0] == task for step in newest for gid in step.gids)
        said = ", ".join(f"{why} {count}" for why, count in reasons.most_common())
        yield note(
            f"task {task}: in its last {plural(groups, 'group')}, agents changed earlier messages "
            f"{plural(reasons.total(), 'time')}, and the model read all again ({said})",
            "the page of tools and agents has the reasons",
        )
