"""Every metric of a run, and how it is read from a snapshot: one list.

Names and units follow Prometheus. Labels have bounded values: tasks of the config, live workers and
words of this file. Dashboards and alerts are tested against this list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from buffer.control.control import Mode
from buffer.control.worker_record import Histogram, WorkerRecord, WorkerState
from rolloutmq.views.run_view import RunView, TaskView

# (values of the labels except `run`, number)
Cells = Iterable[tuple[tuple[str, ...], float]] | Iterable[tuple[tuple[str, ...], Histogram]]
KL = {"old": "policy/kl_old", "reference": "policy/kl_ref", "teachers": "distill/reverse_kl"}
STALENESS = {"mean": "staleness/mean", "max": "staleness/max"}
PARTS = {
    "total": "time/step_s",
    "wait": "time/wait_s",
    "train": "time/train_s",
    "pause": "time/pause_s",
    "publish": "time/publish_s",
}


class _Family(NamedTuple):
    """One metric: its name without `rolloutmq_`, its help text, its labels except `run`."""

    name: str
    text: str
    labels: tuple[str, ...]
    read: Callable[[RunView], Cells]
    make: Any = GaugeMetricFamily

    def metric(self, views: dict[str, RunView]) -> Metric:
        family: Any = self.make(f"rolloutmq_{self.name}", self.text, labels=["run", *self.labels])
        for run, view in views.items():
            for values, number in self.read(view):
                if isinstance(number, Histogram):
                    buckets = [(str(bound_s), n) for bound_s, n in number.at_most().items()]
                    buckets.append(("+Inf", number.count))
                    family.add_metric([run, *values], buckets, number.total_s)
                else:
                    family.add_metric([run, *values], number)
        return family  # type: ignore[no-any-return]


def _of_run(name: str, text: str, read: Callable[[RunView], float]) -> _Family:
    return _Family(name, text, (), lambda snap: [((), float(read(snap)))])


def _of_task(name: str, text: str, read: Callable[[TaskView], float]) -> _Family:
    def cells(snap: RunView) -> Cells:
        return (((task.account.task,), float(read(task))) for task in snap.tasks)

    return _Family(name, text, ("task",), cells)


def _of_worker(name: str, text: str, read: Callable[[WorkerRecord], float | None]) -> _Family:
    """Return a metric of all live workers that report the number."""

    def cells(snap: RunView) -> Cells:
        numbers = ((worker.id, read(worker)) for worker in snap.live_workers)
        return (((worker,), number) for worker, number in numbers if number is not None)

    return _Family(name, text, ("worker",), cells)


def _counter(family: _Family) -> _Family:
    return family._replace(make=CounterMetricFamily)


def _times(
    name: str, text: str, labels: tuple[str, ...], read: Callable[[RunView], Cells]
) -> _Family:
    return _Family(name, text, labels, read, HistogramMetricFamily)


def _task_counter(name: str, text: str, field: str) -> _Family:
    return _counter(_of_task(name, text, lambda task: task.number(field)))


def _held_s(task: TaskView) -> float:
    return task.number("produced_ms") / 1000


def _stages(snap: RunView) -> Cells:
    return (
        ((t.account.task, stage), n) for t in snap.tasks for stage, n in t.account.stages.items()
    )


def _backlog(snap: RunView) -> Cells:
    return (((t.account.task, lane), n) for t in snap.tasks for lane, n in t.backlog.items())


def _staleness(snap: RunView) -> Cells:
    return (((t.account.task, label), n) for t in snap.training for label, n in t.staleness.items())


def _rewards(snap: RunView) -> Cells:
    return (((t.account.task,), t.mean_reward) for t in snap.tasks if t.mean_reward is not None)


def _failures(snap: RunView) -> Cells:
    for task in snap.tasks:
        for cause, number in task.failures_by_cause.items():
            yield (task.account.task, cause), number


def _of_step(name: str, text: str, metric: str | Mapping[str, str], label: str = "") -> _Family:
    """Return a metric of the last train step, if the trainer reports it, or one by `label`."""
    metrics = {"": metric} if isinstance(metric, str) else metric

    def cells(view: RunView) -> Cells:
        known = _step_metrics(view)
        found = [(value, known[each]) for value, each in metrics.items() if each in known]
        return [((value,) if label else (), number) for value, number in found]

    return _Family(name, text, (label,) if label else (), cells)


def _step_metrics(snap: RunView) -> Mapping[str, float]:
    return snap.report.training.metrics if snap.report.training else {}


def _reported_step(snap: RunView) -> Cells:
    return [((), snap.report.training.step)] if snap.report.training else []


def _step_rewards(snap: RunView) -> Cells:
    tasks = [task.account.task for task in snap.training]
    for task in tasks:
        reward = snap.report.reward_of(task, is_only=len(tasks) == 1)
        if reward is not None:
            yield (task,), reward


def _step_tokens_per_s(snap: RunView) -> Cells:
    found = _step_metrics(snap)
    if found.get("time/step_s") and "response_len/tokens" in found:
        yield (), found["response_len/tokens"] / found["time/step_s"]


def _evaluations(snap: RunView) -> Cells:
    for task, evaluation in snap.report.evaluations.items():
        for name in ("accuracy", "score", "groups", "failed"):
            if f"eval/{name}" in evaluation.metrics:
                yield (task, name), evaluation.metrics[f"eval/{name}"]


def _evaluated_steps(snap: RunView) -> Cells:
    return (((task,), done.step) for task, done in snap.report.evaluations.items())


def _steps(snap: RunView) -> Cells:
    return [(("taken",), snap.taken), (("committed",), snap.committed), (("freed",), snap.freed)]


def _mode(snap: RunView) -> Cells:
    return (((mode.value,), float(mode.value == snap.mode)) for mode in Mode)


def _roles(snap: RunView) -> Cells:
    return (((holder.role,), float(holder.is_alive)) for holder in (snap.trainer, snap.producer))


def _silences(snap: RunView) -> Cells:
    for holder in (snap.trainer, snap.producer):
        if holder.silent_ms is not None:
            yield (holder.role,), holder.silent_ms / 1000


def _waited(snap: RunView) -> float:
    return int(snap.control.get("trainer_waited_ms", 0)) / 1000


def _workers(snap: RunView) -> Cells:
    # states that no worker has are 0, so that a graph of them does not end
    counts = Counter({state.value: 0 for state in WorkerState})
    counts.update(worker.state for worker in snap.live_workers)
    counts["silent"] = len(snap.silent_workers)
    return (((state,), number) for state, number in counts.items())


def _judge_times(snap: RunView) -> Cells:
    return (((worker.id,), worker.judge_times) for worker in snap.live_workers)


def _marks(snap: RunView) -> Cells:
    return [(("low",), snap.memory.low), (("high",), snap.memory.high)]


# all metrics of runs but `rolloutmq_workers_wanted`, which needs several snapshots
FAMILIES: tuple[_Family, ...] = (
    _Family("groups", "Groups by stage; each is in exactly one.", ("task", "place"), _stages),
    _Family("jobs_waiting", "Groups that wait for a worker.", ("task", "lane"), _backlog),
    _Family("staleness_groups", "Ready groups by staleness.", ("task", "staleness"), _staleness),
    _of_task("groups_ready", "Groups that a batch may have.", lambda t: t.ready),
    _of_task("groups_too_old", "Groups that are about to expire.", lambda t: t.too_old),
    _of_task("groups_ahead", "Groups between data set and trainer.", lambda t: t.in_flight),
    _of_task("groups_ahead_limit", "Most groups that may be there.", lambda t: t.in_flight_limit),
    _of_task("batch_groups", "Groups of a task in a batch.", lambda t: t.batch_share),
    _of_task(
        "task_stopped", "1 after too many failed tries in a row.", lambda t: bool(t.stop_reason)
    ),
    _Family("reward_mean", "Mean score of all groups, before any filter.", ("task",), _rewards),
    _task_counter("groups_enqueued", "Groups that were drawn and started.", "enqueued"),
    _task_counter("groups_consumed", "Groups that were handed out in batches.", "consumed"),
    _task_counter("samples_produced", "Rollouts in submitted groups.", "produced_samples"),
    _task_counter("groups_produced", "Groups that were completed or filtered.", "produced_groups"),
    _counter(_of_task("group_seconds", "Time that workers held the produced groups.", _held_s)),
    _task_counter("tokens_produced", "Generated tokens; resumed ones once.", "produced_tokens"),
    _task_counter("answers_unparsed", "Rollouts in which no judge found an answer.", "unparsed"),
    _task_counter("answers_truncated", "Rollouts that reached their token limit.", "truncated"),
    _task_counter("tries_failed", "Tries that ended in an error.", "failed"),
    _counter(_Family("failures", "These by cause.", ("task", "cause"), _failures)),
    _task_counter("leases_lost", "Leases that ran out or were revoked.", "leases_lost"),
    _task_counter("groups_expired", "Times that a group became too old.", "expirations"),
    _task_counter("groups_ended_early", "Ended while they ran or waited: too old.", "ended_early"),
    _task_counter("tokens_discarded", "Tokens of groups ended early.", "discarded_tokens"),
    _task_counter("tokens_unmade", "Most that these would still have made.", "unmade_tokens"),
    _task_counter("groups_filtered", "Groups that a filter refused.", "filtered"),
    _task_counter("groups_dropped", "Groups that an operator ended.", "dropped"),
    _task_counter("groups_regenerated", "Groups drawn again after lost data.", "regenerated"),
    # no counter: a requeued group leaves the dead letters
    _of_task("groups_dead", "Groups that used up their tries.", lambda t: t.number("dead")),
    _counter(_Family("train_steps", "Steps taken, committed and freed.", ("stage",), _steps)),
    _Family(
        "step", "Last train step that the trainer reported; step_* are of it.", (), _reported_step
    ),
    _Family("step_reward_mean", "Mean score of a task in its batch.", ("task",), _step_rewards),
    _of_step("step_loss", "Loss of the policy.", "loss/policy"),
    _of_step("step_kl", "KL, by what the policy is compared with.", KL, "against"),
    _of_step("step_entropy", "Mean entropy of a token, nats.", "policy/entropy"),
    _of_step("step_clip_fraction", "Share of tokens that were clipped.", "policy/clip_fraction"),
    _of_step("step_gradient_norm", "Before it is clipped.", "optim/grad_norm"),
    _of_step("step_response_tokens_mean", "Mean length of a response.", "response_len/mean"),
    _of_step("step_staleness", "In train steps, of the groups taken.", STALENESS, "stat"),
    _of_step("step_seconds", "By part; total: of the whole step.", PARTS, "part"),
    _Family("step_tokens_per_second", "Its tokens by its time.", (), _step_tokens_per_s),
    _Family("evaluation", "Last evaluation of a task.", ("task", "metric"), _evaluations),
    _Family("evaluation_step", "Train step whose weights it had.", ("task",), _evaluated_steps),
    _of_run("policy_version", "Train step of the newest weights.", lambda s: s.weights.version),
    _Family("mode", "1 for the mode of the run.", ("mode",), _mode),
    _of_run("mode_age_seconds", "Since the mode last changed.", lambda s: s.paused_ms / 1000),
    _Family("role_alive", "1 while the role's holder sends heartbeats.", ("role",), _roles),
    _Family("role_silent_seconds", "Since its last heartbeat.", ("role",), _silences),
    _counter(_of_run("trainer_wait_seconds", "Waited for groups by this trainer.", _waited)),
    _Family("workers", "Workers; silent ones have missed a lease.", ("state",), _workers),
    _of_worker("worker_tokens_per_second", "As the worker reports it.", lambda w: w.tokens_per_s),
    _of_worker("worker_groups_held", "Leases that a worker holds.", lambda w: w.holds),
    _of_worker("worker_groups_judging", "Held, and only wait for a judge.", lambda w: w.judging),
    _of_worker("worker_engine_requests", "In its engine, waiting too.", lambda w: w.requests),
    _counter(_of_worker("worker_groups_failed", "Groups that failed on it.", lambda w: w.failed)),
    _counter(_of_worker("worker_judge_failures", "Judges' failures.", lambda w: w.judge_failures)),
    _counter(
        _of_worker("worker_processes_replaced", "Users' code that hung.", lambda w: w.replaced)
    ),
    _times("judge_seconds", "Judges' answers, with queue.", ("worker",), _judge_times),
    _times("pause_seconds", "From a pause to the last receipt.", (), lambda s: [((), s.pauses)]),
    _of_run("leases", "Groups that run.", lambda s: s.leases),
    _of_run("leases_overdue", "Leases that ran out and are not taken back.", lambda s: s.overdue),
    _of_run("dead_letters", "Failed groups that wait for an operator.", lambda s: s.dead),
    _of_run("garbage_payloads", "Payloads that wait to be freed.", lambda s: s.garbage),
    _of_run("payload_bytes", "Bytes of all payloads.", lambda s: s.memory.held),
    _Family("payload_bytes_limit", "Marks where prompts wait; 0: none.", ("mark",), _marks),
    _of_run("account_faults", "Errors in the account of groups.", lambda s: len(s.faults)),
)
