"""Every number of a run, in one list: status, JSON, Prometheus and the browser show it from here.

A number that `RunView` or `TaskView` has is a row of RUN or TASK; one that a worker reports is a
field of `HeartbeatNumbers`, which has its own row. Numbers by label follow in FAMILIES.

Names and units of metrics follow Prometheus. Labels have bounded values: tasks of the config, live
workers and words of this file. Dashboards and alerts are tested against this list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from buffer.control.control import Mode
from buffer.control.worker_record import NUMBERS, Histogram, WorkerState
from rolloutmq.output import count
from rolloutmq.views.run_view import RunView, TaskView

Level = Literal["note", "warning", "error"]


class Number(NamedTuple):
    """One number of a run or a task. `read` returns None where it is unknown."""

    text: str
    """what it is: the help text of its metric"""
    read: Callable[[Any], float | None]
    metric: str = ""
    """its name for Prometheus, without `rolloutmq_`; "": none"""
    key: str = ""
    """its name in JSON; "": JSON has it from elsewhere, as all counters of a task"""
    is_counter: bool = False
    words: str = ""
    """for `status` and the browser, while it is not 0; {} stands for the number"""
    level: Level = "note"


class Note(NamedTuple):
    """What `status` and the browser say of a number."""

    text: str
    level: Level


def notes_of(view: RunView | TaskView) -> Iterator[Note]:
    """Yield the numbers of a run or a task that are said in words, and are not 0."""
    for row in RUN if isinstance(view, RunView) else TASK:
        if row.words and (number := row.read(view)):
            yield Note(row.words.format(count(number)), row.level)


def json_of(view: RunView | TaskView) -> dict[str, float | None]:
    rows = RUN if isinstance(view, RunView) else TASK
    return {row.key: row.read(view) for row in rows if row.key}


def _counted(field: str, metric: str, text: str, **more: Any) -> Number:
    """Return the row of a counter of `progress:<task>`."""
    return Number(text, lambda task: task.number(field), metric, is_counter=True, **more)


RUN = (
    Number("Tokens per second of all live workers.", lambda s: s.tokens_per_s, key="tokens_per_s"),
    Number("Running groups that wait for a judge.", lambda s: s.judging, key="judging"),
    Number("Train step of the newest weights.", lambda s: s.weights.version, "policy_version"),
    Number("Since the mode last changed.", lambda s: s.paused_ms / 1000, "mode_age_seconds"),
    Number("Waited for groups by this trainer.",
        lambda s: int(s.control.get("trainer_waited_ms", 0)) / 1000, "trainer_wait_seconds",
        is_counter=True),
    Number("Groups that run.", lambda s: s.leases, "leases", "leases"),
    Number("Leases that ran out and are not taken back.", lambda s: s.overdue, "leases_overdue",
        "overdue_leases"),
    Number("Failed groups that wait for an operator.", lambda s: s.dead, "dead_letters",
        "dead_letters", words="dead letters: {} (rolloutmq dead)", level="warning"),
    Number("Payloads that wait to be freed.", lambda s: s.garbage, "garbage_payloads", "garbage"),
    Number("Bytes of all payloads.", lambda s: s.memory.held, "payload_bytes"),
    Number("So far, in the currency of [cost].", lambda s: s.reported("cost/total"), "cost",
        "cost"),
    Number("At the pace of the last steps.", lambda s: s.reported("cost/next_100_steps"),
        "cost_next_100_steps", "cost_next_100_steps"),
    Number("Rollouts that failed, and were made again in their group, by live workers.",
        lambda s: s.retries.total(), key="retried",
        words="rollouts that failed and were made again: {}"),
    Number("Errors in the account of groups.", lambda s: len(s.faults), "account_faults"),
)  # fmt: skip

TASK = (
    Number("Groups that a batch may have.", lambda t: t.ready, "groups_ready", "ready"),
    Number("Groups that are about to expire.", lambda t: t.too_old, "groups_too_old", "too_old",
        words="{} too old, about to expire", level="warning"),
    Number("Groups between data set and trainer.", lambda t: t.in_flight, "groups_ahead",
        "in_flight"),
    Number("Most groups that may be there.", lambda t: t.in_flight_limit, "groups_ahead_limit",
        "in_flight_limit"),
    Number("Groups of a task in a batch.", lambda t: t.batch_share, "batch_groups"),
    Number("1 after too many failed tries in a row.", lambda t: bool(t.stop_reason),
        "task_stopped"),
    Number("Mean score of all groups, before any filter.", lambda t: t.mean_reward, "reward_mean",
        "mean_reward"),
    _counted("enqueued", "groups_enqueued", "Groups that were drawn and started."),
    _counted("consumed", "groups_consumed", "Groups that were handed out in batches."),
    _counted("produced_samples", "samples_produced", "Rollouts in submitted groups."),
    _counted("produced_groups", "groups_produced", "Groups that were completed or filtered."),
    Number("Time that workers held the produced groups.",
        lambda t: t.number("produced_ms") / 1000, "group_seconds", is_counter=True),
    _counted("produced_tokens", "tokens_produced", "Generated tokens; resumed ones once."),
    _counted("unparsed", "answers_unparsed", "Rollouts in which no judge found an answer."),
    _counted("truncated", "answers_truncated", "Rollouts that reached their token limit."),
    _counted("failed", "tries_failed", "Tries that ended in an error."),
    _counted("leases_lost", "leases_lost", "Leases that ran out or were revoked."),
    _counted("expirations", "groups_expired", "Times that a group became too old."),
    _counted("ended_early", "groups_ended_early", "Ended while they ran or waited: too old.",
        words="{} ended early, too old"),
    _counted("discarded_tokens", "tokens_discarded", "Tokens of groups ended early.",
        words="{} tokens of these"),
    _counted("unmade_tokens", "tokens_unmade", "Most that these would still have made."),
    _counted("filtered", "groups_filtered", "Groups that a filter refused."),
    _counted("dropped", "groups_dropped", "Groups that an operator ended."),
    _counted("skipped", "groups_skipped", "Groups whose prompts make no sense."),
    _counted("reasserted", "", "Groups that the server had lost, from checkpoints.",
        words="{} reasserted from checkpoints", level="warning"),
    _counted("regenerated", "groups_regenerated", "Groups drawn again after lost data.",
        words="{} generated again after lost data", level="warning"),
    Number("Questions to its judges, of kinds that count them.", lambda t: t.judge_use.calls,
        "judge_calls", "judge_calls", is_counter=True),
    Number("Verdicts from the cache.", lambda t: t.judge_use.cached, "judge_cached",
        "judge_cached", is_counter=True, words="{} verdicts from the cache"),
    Number("Prompt tokens of judging models.", lambda t: t.judge_use.prompt_tokens,
        "judge_prompt_tokens", "judge_prompt_tokens", is_counter=True),
    Number("Answer tokens of judging models.", lambda t: t.judge_use.completion_tokens,
        "judge_completion_tokens", "judge_completion_tokens", is_counter=True),
    # no counter: a requeued group leaves the dead letters
    Number("Groups that used up their tries.", lambda t: t.number("dead"), "groups_dead"),
)  # fmt: skip


# (values of the labels except `run`, number)
Cells = Iterable[tuple[tuple[str, ...], float]] | Iterable[tuple[tuple[str, ...], Histogram]]
KL = {"old": "policy/kl_old", "reference": "policy/kl_ref", "teachers": "distill/reverse_kl"}
STALENESS = {"mean": "staleness/mean", "max": "staleness/max"}
IDLE = {"workers": "cost/idle_workers", "trainer": "cost/idle_trainer"}
PARTS = {part: f"time/{part}_s" for part in ("wait", "train", "pause", "publish")}
PARTS["total"] = "time/step_s"


class Family(NamedTuple):
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


def _step_metrics(view: RunView) -> Mapping[str, float]:
    return view.report.training.metrics if view.report.training else {}


def _of_step(name: str, text: str, metric: str | Mapping[str, str], label: str = "") -> Family:
    """Return a metric of the last train step, if the trainer reports it, or one by `label`."""
    metrics = {"": metric} if isinstance(metric, str) else metric

    def cells(view: RunView) -> Cells:
        known = _step_metrics(view)
        found = [(value, known[each]) for value, each in metrics.items() if each in known]
        return [((value,) if label else (), number) for value, number in found]

    return Family(name, text, (label,) if label else (), cells)


def _step_rewards(view: RunView) -> Cells:
    tasks = [task.account.task for task in view.training]
    for task in tasks:
        reward = view.report.reward_of(task, is_only=len(tasks) == 1)
        if reward is not None:
            yield (task,), reward


def _step_tokens_per_s(view: RunView) -> Cells:
    found = _step_metrics(view)
    if found.get("time/step_s") and "response_len/tokens" in found:
        yield (), found["response_len/tokens"] / found["time/step_s"]


def _evaluations(view: RunView) -> Cells:
    for task, evaluation in view.report.evaluations.items():
        for name in ("accuracy", "score", "groups", "failed"):
            if f"eval/{name}" in evaluation.metrics:
                yield (task, name), evaluation.metrics[f"eval/{name}"]


def _workers(view: RunView) -> Cells:
    # states that no worker has are 0, so that a graph of them does not end
    counts = Counter({state.value: 0 for state in WorkerState})
    counts.update(worker.state for worker in view.live_workers)
    counts["silent"] = len(view.silent_workers)
    return (((state,), number) for state, number in counts.items())


def _alone(read: Callable[[RunView], float | None], view: RunView) -> Cells:
    number = read(view)
    return [] if number is None else [((), float(number))]


def _by_label(counts: Callable[[TaskView], Mapping[str, int]], view: RunView) -> Cells:
    return (((t.account.task, key), n) for t in view.tasks for key, n in counts(t).items())


def _by_task(read: Callable[[TaskView], float | None], view: RunView) -> Cells:
    numbers = ((task.account.task, read(task)) for task in view.tasks)
    return (((task,), float(number)) for task, number in numbers if number is not None)


def _by_worker(name: str, view: RunView) -> Cells:
    numbers = ((worker.id, getattr(worker, name)) for worker in view.live_workers)
    return (((worker,), number) for worker, number in numbers if number is not None)


def _retries(view: RunView) -> Cells:
    for worker in view.live_workers:
        for pair, number in worker.retries.items():
            yield (worker.id, *pair), number


def _rows() -> Iterator[Family]:
    """Yield the metrics of all rows of RUN, TASK and `HeartbeatNumbers`."""
    kinds: dict[bool, Any] = {False: GaugeMetricFamily, True: CounterMetricFamily}
    for row in RUN:
        one = partial(_alone, row.read)
        yield Family(row.metric, row.text, (), one, kinds[row.is_counter])
    for row in TASK:
        by_task = partial(_by_task, row.read)
        yield Family(row.metric, row.text, ("task",), by_task, kinds[row.is_counter])
    for name, of in NUMBERS.items():
        by_worker = partial(_by_worker, name)
        yield Family(of.metric, of.words, ("worker",), by_worker, kinds[of.is_counter])


# all metrics of runs but `rolloutmq_workers_wanted`, which needs several snapshots
FAMILIES: tuple[Family, ...] = (
    *(family for family in _rows() if family.name),
    Family(
        "groups", "Groups by stage; each is in exactly one.", ("task", "place"),
        partial(_by_label, lambda t: t.account.stages),
    ),
    Family(
        "jobs_waiting", "Groups that wait for a worker.", ("task", "lane"),
        partial(_by_label, lambda t: t.backlog),
    ),
    Family(
        "staleness_groups", "Ready groups by staleness.", ("task", "staleness"),
        partial(_by_label, lambda t: {} if t.is_gone else t.staleness),
    ),
    Family(
        "failures", "These by cause.", ("task", "cause"),
        partial(_by_label, lambda t: t.failures_by_cause), CounterMetricFamily,
    ),
    Family(
        "train_steps", "Steps taken, committed and freed.", ("stage",),
        lambda s: [(("taken",), s.taken), (("committed",), s.committed), (("freed",), s.freed)],
        CounterMetricFamily,
    ),
    Family(
        "step", "Last train step that the trainer reported; step_* are of it.", (),
        lambda s: [((), s.report.training.step)] if s.report.training else [],
    ),
    Family("step_reward_mean", "Mean score of a task in its batch.", ("task",), _step_rewards),
    Family(
        "tokens", "Sampled tokens by what became of them.", ("task", "row"),
        partial(_by_label, lambda t: t.tokens),
    ),
    Family(
        "cost_currency", "1 for the currency of all costs.", ("currency",),
        lambda s: [((s.currency,), 1.0)] if s.currency else [],
    ),
    _of_step("cost_step", "Of the last step.", "cost/step"),
    _of_step("cost_million_trained", "By a million trained tokens.", "cost/million_trained"),
    _of_step("never_trained_share", "Of tokens that ended.", "cost/never_trained"),
    _of_step("idle_share", "Of GPU time.", IDLE, "of"),
    _of_step("step_loss", "Loss of the policy.", "loss/policy"),
    _of_step("step_kl", "KL, by what the policy is compared with.", KL, "against"),
    _of_step("step_entropy", "Mean entropy of a token, nats.", "policy/entropy"),
    _of_step("step_clip_fraction", "Share of tokens that were clipped.", "policy/clip_fraction"),
    _of_step("step_gradient_norm", "Before it is clipped.", "optim/grad_norm"),
    _of_step("step_response_tokens_mean", "Mean length of a response.", "response_len/mean"),
    _of_step("step_staleness", "In train steps, of the groups taken.", STALENESS, "stat"),
    _of_step("step_seconds", "By part; total: of the whole step.", PARTS, "part"),
    Family("step_tokens_per_second", "Its tokens by its time.", (), _step_tokens_per_s),
    Family("evaluation", "Last evaluation of a task.", ("task", "metric"), _evaluations),
    Family(
        "evaluation_step", "Train step whose weights it had.", ("task",),
        lambda s: (((task,), done.step) for task, done in s.report.evaluations.items()),
    ),
    Family(
        "mode", "1 for the mode of the run.", ("mode",),
        lambda s: (((mode.value,), float(mode.value == s.mode)) for mode in Mode),
    ),
    Family(
        "role_alive", "1 while the role's holder sends heartbeats.", ("role",),
        lambda s: (((role.role,), float(role.is_alive)) for role in (s.trainer, s.producer)),
    ),
    Family(
        "role_silent_seconds", "Since its last heartbeat.", ("role",),
        lambda s: [((role.role,), role.silent_ms / 1000) for role in (s.trainer, s.producer)
            if role.silent_ms is not None],
    ),
    Family("workers", "Workers; silent ones have missed a lease.", ("state",), _workers),
    Family(
        "worker_groups_held", "Leases that a worker holds.", ("worker",),
        partial(_by_worker, "holds"),
    ),
    Family(
        "worker_rollouts_retried", "Rollouts that failed while their group went on.",
        ("worker", "task", "cause"), _retries, CounterMetricFamily,
    ),
    Family(
        "judge_seconds", "Judges' answers, with queue.", ("worker",),
        partial(_by_worker, "judge_times"), HistogramMetricFamily,
    ),
    Family(
        "pause_seconds", "From a pause to the last receipt.", (),
        lambda s: [((), s.pauses)], HistogramMetricFamily,
    ),
    Family(
        "payload_bytes_limit", "Marks where prompts wait; 0: none.", ("mark",),
        lambda s: [(("low",), s.memory.low), (("high",), s.memory.high)],
    ),
)  # fmt: skip
