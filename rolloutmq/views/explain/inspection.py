"""Find what a view of a run does not show: the judge queue, the weights' folder, dead letters.

Each may be inaccessible (missing rights, another machine's folder), and is then left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from redis.exceptions import ResponseError

from buffer.errors import (
    PayloadMissing,
    RunError,
    SchemaVersionError,
    StoreError,
    StoreUnavailable,
    WireError,
)
from buffer.failure_text import headline, trace_of
from buffer.groups.dead_letters import by_cause
from buffer.ids import split_group_id
from buffer.job import PayloadRef
from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.run import Run
from buffer.weights import folder_manifest as weights_manifest
from buffer.wire.group import RolloutGroup
from consumer.grpo.reporting.step_log import TrainedStep, read_steps
from rolloutmq.output import plural
from rolloutmq.views.explain.diagnosis import Level, Symptom, diagnose, worst_first
from rolloutmq.views.explain.shares import STEPS, shares_of
from rolloutmq.views.explain.who_waited import read_waits
from rolloutmq.views.run_view import RunView, read_run_view

MOST = 32  # prompts that are read of each kind
FEWEST = 8  # below this, their quartiles say nothing
MOST_LETTERS = 1000  # dead letters of all tasks that are looked through
# from which the model's data is biased: a ratio of medians, a difference of a source's shares
LENGTH_RATIO = 1.5
SOURCE_DIFFERENCE = 0.3


def failed_rows(run: Run, task: str) -> tuple[str, bool] | None:
    """Return how the prompts differ, and whether the model's data is biased by that.

    None with too few groups of either kind. Raises StoreError.
    """
    letters = islice(run.dead_letters.newest(), MOST_LETTERS)
    dead = (letter.gid for letter in letters if letter.task == task)
    alive = run.groups.find({"task": task, "stage": {"$ne": "dead"}}, limit=MOST)
    failed = list(_prompts(run, dead))
    others = list(_prompts(run, (record.gid for record in alive)))
    if min(len(failed), len(others)) < FEWEST:
        return None
    lengths, is_biased = _lengths(failed, others)
    sources, is_one_source = _sources(failed, others)
    return lengths + sources, is_biased or is_one_source


def _prompts(run: Run, gids: Iterable[str]) -> Iterator[RolloutGroup]:
    for gid in islice(gids, MOST):
        try:
            yield run.buffer.read(PayloadRef(gid, "init", 1, 0, ""))
        except (PayloadMissing, WireError):  # ended since, or put without a prompt
            continue


def _lengths(failed: Sequence[RolloutGroup], others: Sequence[RolloutGroup]) -> tuple[str, bool]:
    """Compare lengths, in tokens if all prompts have them, else in characters."""
    has_tokens = all(len(prompt.prompt_ids) for prompt in (*failed, *others))
    unit = "tokens" if has_tokens else "characters"
    quartiles = [
        [int(n) for n in np.percentile([_length(each, unit) for each in prompts], (25, 50, 75))]
        for prompts in (failed, others)
    ]
    words = [" / ".join(map(str, each)) for each in quartiles]
    low, high = sorted(max(1, median) for _, median, _ in quartiles)
    said = f"its failed prompts have {words[0]} {unit} (quartiles), others {words[1]}"
    return said, high / low > LENGTH_RATIO


def _length(prompt: RolloutGroup, unit: str) -> int:
    if unit == "tokens":
        return len(prompt.prompt_ids)
    return sum(len(str(message.get("content", ""))) for message in prompt.shared.messages)


def _sources(failed: Sequence[RolloutGroup], others: Sequence[RolloutGroup]) -> tuple[str, bool]:
    """Compare the shares of the data source that is most typical of the failed prompts."""
    of_failed, of_others = _source_shares(failed), _source_shares(others)
    if len(of_failed.keys() | of_others) < 2:
        return "", False
    source = max(of_failed, key=lambda name: of_failed[name] - of_others.get(name, 0))
    failed_share, other_share = of_failed[source], of_others.get(source, 0)
    named = source or "no source"
    said = f"; {failed_share:.0%} of them are of {named!r}, of the others {other_share:.0%}"
    return said, failed_share - other_share > SOURCE_DIFFERENCE


def _source_shares(prompts: Sequence[RolloutGroup]) -> dict[str, float]:
    counts = Counter(prompt.shared.data_source or "" for prompt in prompts)
    return {source: number / len(prompts) for source, number in counts.items()}


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
        return snap, worst_first(
            [*diagnose(snap), *inspect(run, snap, read_steps(find_folder(run)))]
        )
    except StoreUnavailable:
        raise
    except (RunError, StoreError, SchemaVersionError) as error:
        fix = error.hint or "inspect it with the version that created it"
        return None, [Symptom("fault", error.message, fix)]


def inspect(run: Run, snap: RunView, steps: Sequence[TrainedStep]) -> list[Symptom]:
    """Return the symptoms of a run that its snapshot does not show; `steps`: the trained ones."""
    found = [*_damage(run, snap), *_judges(run), *_weights(snap), *_dead_letters(run, snap)]
    found += _stragglers(run, snap)
    return [*found, *_failed_rows(run, snap), *_waits(run, snap, steps), *_contexts(steps)]


def _damage(run: Run, snap: RunView) -> Iterator[Symptom]:
    """Report what `fsck` finds: everything in a small run, only cheap checks in a large one."""
    groups = sum(task.account.total for task in snap.tasks)
    databases: Any = run.store.control.info("keyspace")  # DBSIZE is for administrators
    keys = sum(database["keys"] for database in databases.values())
    is_small = max(groups, keys) <= FEW
    found = run.account.fsck().damage if is_small else run.account.spot_check()
    texts = [each.text for each in found if each.text not in snap.faults]
    for text in texts[:SHOWN]:
        yield Symptom("fault", text, "`rolloutmq fsck` lists all that is wrong")
    if len(texts) > SHOWN:
        more = f"{len(texts) - SHOWN} more faults"
        yield Symptom("fault", more, "`rolloutmq fsck` lists all that is wrong")
    if not is_small:
        what = f"{groups} groups: only the ledger and the newest of them were checked"
        yield Symptom("note", what, "`rolloutmq fsck` checks them all")


def count_judges(store: Store, keys: Keys) -> tuple[int, int]:
    """Return how many rollouts wait for judges on this server, and how many of these live."""
    raw: Any = store.control
    try:
        waiting = raw.llen(f"rq:queue:{keys.judge_queue}")
        # a judge that was killed stays in the set, but its own key expires
        workers = raw.smembers(f"rq:workers:{keys.judge_queue}")
        return waiting, sum(raw.exists(worker) for worker in workers)
    except ResponseError:  # a user who may not read them, or a cluster, where they have other nodes
        return 0, 0


def _judges(run: Run) -> Iterator[Symptom]:
    """Report rollouts that wait for judges while none lives, from rq's keys on its server."""
    waiting, alive = count_judges(run.store, run.keys)
    if waiting and not alive:
        what = f"{plural(waiting, 'rollout')} waiting to be judged, and no judge is alive"
        yield Symptom("stuck", what, "`rolloutmq judge CONFIG`")


def _weights(snap: RunView) -> Iterator[Symptom]:
    """Report a weights folder with other files than published; workers check remote folders."""
    folder = Path(snap.control.get("weights_path", ""))
    checksum = snap.control.get("weights_checksum", "")
    if not checksum or not folder.is_dir():
        return
    try:
        weights_manifest.check_sizes(folder, checksum)
    except (OSError, WireError) as error:
        what = f"the weights {snap.weights} in {folder} are incomplete: {error}"
        yield Symptom(
            "stuck", what, "start the trainer again: it publishes them from its checkpoint"
        )


def _dead_letters(run: Run, snap: RunView) -> Iterator[Symptom]:
    """Report the most frequent causes of the newest dead letters."""
    if not snap.dead:
        return
    try:
        causes = by_cause(islice(run.dead_letters.newest(), FEW_LETTERS))
    except StoreError:
        return
    shown = causes[:SHOWN]
    for _, letters in shown:
        newest = letters[0]
        judged = next((letter.gid for letter in letters if letter.has_responses), None)
        again = f", `rolloutmq rejudge {judged} --pdb` runs its judge again" if judged else ""
        what = f"{plural(len(letters), 'dead letter')}: {headline(newest.reason, 200)}"
        fix = (
            f"`rolloutmq show {judged or newest.gid}` shows one{again}; fix the cause, then run "
            "`rolloutmq requeue --all-dead --yes`"
        )
        yield Symptom("note", what, fix, newest.age_ms, trace_of(newest.reason))
    if (more := snap.dead - sum(len(letters) for _, letters in shown)) > 0:
        yield Symptom("note", plural(more, "more dead letter"), "`rolloutmq dead` lists them")


def _stragglers(run: Run, snap: RunView) -> Iterator[Symptom]:
    """Report groups that run, could serve no later step, and so are waited for."""
    step = snap.taken + 1
    for task in snap.training:
        name, cut = task.account.task, step - task.stale_threshold
        is_ready = task.ready >= max(1, task.batch_share) and task.account.running
        if not (is_ready and run.limits.waits_for_stragglers(name)):
            continue
        try:
            gids = run.store.ask("stragglers", "ZRANGEBYSCORE", run.keys.age(name), cut, cut)
            late = [*run.groups.find({"gid": {"$in": [gid.decode() for gid in gids]}})]
        except StoreError:
            continue
        if late:
            oldest = max(late, key=lambda record: record.time_ms or 0)
            what = (
                f"step {step} waits for {plural(len(late), 'group')} of task {name} that began "
                f"{task.stale_threshold} steps ago; {oldest.gid} is with {oldest.owner}"
            )
            fix = (
                f"nothing while it samples; a larger `tasks.{name}.max_staleness` waits less; "
                f"`rolloutmq drop {oldest.gid} --revoke {oldest.owner} --yes` ends one that hangs, "
                "[strategy] group_time_limit_s every such one"
            )
            yield Symptom("note", what, fix, oldest.time_ms)


def _waits(run: Run, snap: RunView, steps: Sequence[TrainedStep]) -> Iterator[Symptom]:
    try:
        waits = read_waits(run, snap, steps)
    except StoreError:
        return
    if waits:
        yield Symptom("note", str(waits), waits.advice)


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
        yield Symptom(
            "note",
            f"task {task}: in its last {plural(groups, 'group')}, agents changed earlier messages "
            f"{plural(reasons.total(), 'time')}, and the model read all again ({said})",
            "the page of tools and agents has the reasons",
        )


def _failed_rows(run: Run, snap: RunView) -> Iterator[Symptom]:
    """Report which rows a task fails for, where their share is a finding."""
    for task in snap.tasks:
        is_failing = any(s.name == "failed" and s.level != "note" for s in shares_of(task))
        try:
            rows = failed_rows(run, task.account.task) if is_failing else None
        except StoreError:
            continue
        if rows:
            said, is_biased = rows
            level: Level = "warning" if is_biased else "note"
            fix = "until they are fixed, the model is trained on the others alone"
            yield Symptom(level, f"task {task.account.task}: {said}", fix if is_biased else "")
