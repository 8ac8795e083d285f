"""Launch a whole run on one machine: prepare, start, watch and show it, and report the outcome.

The launcher holds no state and may be killed at any moment: its children end themselves, and the
next `rolloutmq run` of the config continues from the checkpoint and from Redis.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from buffer.control.control import Mode
from buffer.errors import AccountError, RolloutMQError, StoreUnavailable
from buffer.ledger.account import FsckReport
from buffer.run.open import embedded_server, open_store, own_run
from buffer.run.run import Run
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.step_log import read_evaluations
from producer_workers.agent_loops.agent_loop import commands_of
from rolloutmq.check.machine import placement_of
from rolloutmq.config.config import Config
from rolloutmq.config.kept_config import keep_config
from rolloutmq.hang_up import is_lost_terminal
from rolloutmq.launch.child import Child
from rolloutmq.launch.create import create_again, create_run
from rolloutmq.launch.kept_server import KeptServer
from rolloutmq.launch.prepare import await_roles, check_start, is_done, last_step, prepare_model
from rolloutmq.options import server_flags, set_flags
from rolloutmq.output import console as open_console
from rolloutmq.presets import find_config
from rolloutmq.process_ends import ProcessJournal
from rolloutmq.run_owner import FIRST_STOP, SECOND_STOP, Stage, own
from rolloutmq.views.history import History
from rolloutmq.views.run_folder import RunFolder, accuracy_table
from rolloutmq.views.run_view import RunView, read_run_view
from rolloutmq.views.screen import LiveNotes, groups_table, watch
from rolloutmq.views.setting_view import override_lines
from rolloutmq.web.report import write_report

POLL_S = 0.5  # between two checks of the processes
POLLS_PER_LINE = 10  # checks per line of output, where the output is not a terminal
SUBMITS = frozenset({"completed", "filtered", "aborted"})
MOST_EVENTS = 5000  # newest ones, among which the last submit of a worker is found

STOP_S = 60.0  # for children to exit after SIGTERM
CHECKPOINT_S = 600.0  # for the trainer to exit: it writes a checkpoint first
LINE_S = 5.0  # between two lines that name the children that have not ended


class Launcher:
    """Starts the processes of a run, with the config's path and the same overrides for each."""

    def __init__(
        self,
        config: Config,
        path: Path,
        overrides: list[str],
        *,
        redis_url: str | None,
        regenerate: bool = False,
        exit_when_stuck: bool = False,
        screen: Console | None = None,
        is_reported: bool = True,
    ) -> None:
        """Make a launcher. `is_reported`: print the outcome, with a plot and the account."""
        self._is_reported = is_reported
        self._train = ["train", *(["--exit-when-stuck"] if exit_when_stuck else [])]
        self._stuck_on: set[str] = set()
        self._regenerate = regenerate
        self._config = config
        self._redis_url = redis_url
        self._source = [str(path), *overrides]
        self._command = [str(path), *set_flags(overrides)]
        self._folder = config.run.folder
        self._where = server_flags(config.redis.resolve_url(redis_url), self._folder)
        self._console = screen or open_console()
        self._journal = ProcessJournal(self._folder)
        self._children: list[Child] = []
        self._judges: list[Child] = []
        self._server: KeptServer | None = None
        self._shared_env: dict[str, str] = {}

    def run(self) -> None:
        """Start or continue the run until its last step; Ctrl-C stops it in order."""
        (self._config.run.make_folder() / "logs").mkdir(exist_ok=True)
        for number in (FIRST_STOP, SECOND_STOP):
            signal.signal(number, signal.default_int_handler)
        config = self._config
        # two launchers would fence each other's trainer and stop each other's server
        with own(self._folder, config.run.name, self._command, config.plan.steps) as self._owned:
            self._run()

    def _run(self) -> None:
        run: Run | None = None
        try:
            run = self._prepare()
            steps = run.limits.steps
            self._owned.note(Stage.PREPARING, steps=steps)
            if is_done(self._config, steps):
                self._console.print(
                    f"all {steps} steps are done; to start a new run, remove {self._folder}"
                )
            else:
                self._owned.note(Stage.STARTING)
                self._start(run)
                self._watch(run)
                self._stop_children()
                self._owned.note(Stage.STOPPING)
            run.janitor.sweep()
            if self._is_reported:
                account = finish(self._console, self._config, run, self._where)
                self._owned.note(Stage.STOPPING, account=account)
        except (KeyboardInterrupt, OSError) as error:
            self._owned.check()  # files of a deleted folder are missing
            # the terminal may be gone before its signal arrives
            if not (isinstance(error, KeyboardInterrupt) or is_lost_terminal(error)):
                raise
            self._console.print(
                "\nstopping in order (Ctrl-C again: at once); the same command continues the run"
            )
            self._stop_children()
            self._report_stop(run)
            raise KeyboardInterrupt from error
        finally:
            for number in (signal.SIGINT, FIRST_STOP, SECOND_STOP, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            for child in self._children:
                child.kill()
            if self._server:
                self._server.server.leave()

    # -- before --------------------------------------------------------------

    def _prepare(self) -> Run:
        say = self._console.print
        say("checks   the config, its data sets and its model")
        config = self._config = check_start(self._config, self._source)
        url = config.redis.resolve_url(self._redis_url)
        if not url:
            server = embedded_server(config)
            self._server = KeptServer(server, self._journal)
            self._server.start()
            url = server.url
        self._shared_env = {"REDIS_URL": url}
        store = open_store(config, url, name="rolloutmq-run")
        where = self._server.server.cli if self._server else "from the config or REDIS_URL"
        say(f"server   {where}")
        model = prepare_model(config, self._command)
        if self._regenerate and not is_done(config, last_step(config)):
            wait_s = 2 * config.limits(0).role_timeout_ms / 1000
            run = create_again(
                store, config, model, lambda what: say(f"clears   {what}"), wait_s=wait_s
            )
        else:
            if earlier := own_run(store, config):
                # this config must not change the settings of a run that another start still trains
                await_roles(earlier, say)
            run = create_run(store, config, model, is_done=partial(is_done, config))
        keep_config(config, find_config(Path(self._source[0])), self._source[1:])
        for warning in config.warnings():
            say(f"warning  {warning}")
        for change in run.changes:
            say(f"changed  {change}")
        for line in override_lines(run.settings):
            say(f"set      {line}")
        for task in run.limits.tasks:
            if run.task_stops.of(task).is_stopped:  # its user has fixed the cause
                run.jobs.resume_task(task)
                say(f"task     {task} was stopped, and is tried again")
        taken, committed, _ = run.ledger.steps()
        where = f"continues: step {committed} is committed, {taken} taken" if taken else "starts"
        say(f"model    {model}\nrun      {run.name} {where}; logs in {self._folder / 'logs'}")
        return run

    def _start(self, run: Run) -> None:
        config = self._config
        await_roles(run, self._console.print)
        ranks = config.launch.ranks(has_own_loop=config.trainer.loop is not None)
        placement = placement_of(config)
        # on a CPU every process gets a share: torch would use all cores in each of them
        sharers = config.launch.workers + ranks
        threads = str(max(1, (os.cpu_count() or 1) // sharers))
        if not placement.trainer and "OMP_NUM_THREADS" not in os.environ:
            self._shared_env["OMP_NUM_THREADS"] = threads
        no_gpu = {"CUDA_VISIBLE_DEVICES": ""}

        def last_submit(child: Child) -> object:
            for at_ms, name, fields in reversed(run.events.last(MOST_EVENTS)):
                if name in SUBMITS and fields.get("worker") == child.name:
                    return at_ms, fields["gid"]
            return None

        def count(name: str) -> Callable[[Child], object]:
            return lambda _: sum(int(run.progress(task).get(name, 0)) for task in run.limits.tasks)

        # never with --regenerate: a trainer that is started again would clear the run again
        self._trainer = self._child(
            "trainer",
            self._train,
            placement.environment(placement.trainer),
            lambda _: run.ledger.steps().committed,
            ranks=ranks,
            may_idle=False,
        )
        self._producer = self._child("producer", ["producer"], no_gpu, count("enqueued"))
        commands = set(commands_of(config.tasks, config.worker.agent_loop).values())
        verb = commands.pop() if len(commands) == 1 else "worker"
        self._workers = [
            self._child(
                f"worker-{i}",
                [verb, "--id", f"worker-{i}", "--take-over"],
                placement.environment(gpus),
                last_submit,
            )
            for i, gpus in enumerate(placement.workers)
        ]
        if any(task.judging.is_elsewhere for task in config.tasks.values()):
            args = ["judge", "--workers", str(config.launch.judge_workers)]
            self._judges = [self._child("judge", args, no_gpu, count("raw_rewards_count"))]
        for child in (self._trainer, self._producer):
            child.start("--take-over")
        for child in (*self._judges, *self._workers):
            child.start()

    def _child(
        self,
        name: str,
        args: list[str],
        env: dict[str, str],
        mark: Callable[[Child], object],
        *,
        ranks: int = 1,
        may_idle: bool = True,
    ) -> Child:
        log = self._folder / "logs" / f"{name}.log"
        verb, *flags = args
        env = self._shared_env | env

        def known_mark(child: Child) -> object:
            try:
                return mark(child) or None
            except RolloutMQError:  # the view shows it
                return None

        child = Child(
            name,
            [verb, *self._command, *flags],
            log,
            env,
            self._journal,
            restarts=self._config.launch.max_restarts,
            log_bytes=self._config.launch.log_bytes,
            ranks=ranks,
            mark=known_mark,
            may_idle=may_idle,
        )
        self._children.append(child)
        return child

    # -- while it runs -------------------------------------------------------

    def _watch(self, run: Run) -> None:
        """Show the run and keep its processes alive until the trainer has done its last step."""
        # this process restarts the server, so it must not wait for it for long
        run.store.deadline_s = 2.0
        notes = LiveNotes(started_s=self._started_s())
        history = History(self._folder)

        def is_over() -> bool:
            # without a terminal, lines are rare, but processes are checked as often
            for _ in range(1 if self._console.is_terminal else POLLS_PER_LINE):
                if self._trainer.succeeded:
                    return True
                self._owned.check()
                self._note_progress(run)
                stuck = self._note_stuck(history.last) if history.last else []
                news = [*stuck, *self._keep_alive(run)]
                notes.lines = [*notes.lines, *news][-4:]  # reports that stay on the screen
                for line in () if self._console.is_terminal else news:
                    self._console.print(line)
                time.sleep(POLL_S)
            notes.started_s = self._started_s()
            return self._trainer.succeeded

        watch(run, history, notes, self._console, is_over, every_s=0.01)

    def _started_s(self) -> dict[str, float]:
        shown = (self._trainer, self._producer, *self._workers)
        return {child.name: child.age_s for child in shown if child.pid}

    def _note_progress(self, run: Run) -> None:
        """Record that all members have joined, and a changed number of steps."""
        record = self._owned.record
        if record.stage is Stage.STARTING:
            try:
                view = read_run_view(run)
            except StoreUnavailable:
                return  # the view shows it, and the next poll is soon
            if view.trainer.is_alive and view.producer.is_alive and view.live_workers:
                self._owned.note(Stage.RUNNING, record.detail)
        if run.limits.steps != record.steps:
            self._owned.note(record.stage, record.detail, steps=run.limits.steps)

    def _note_stuck(self, view: RunView) -> list[str]:
        """Ring and report when the trainer begins to wait for a stopped task, and when that ends.

        A trainer that is started again meanwhile begins no other wait.
        """
        before = self._stuck_on
        stopped = {
            task.account.task: task.trouble(view.now_ms) for task in view.tasks if task.stop_reason
        }
        self._stuck_on = before.union(view.stuck_on).intersection(stopped)
        if self._stuck_on == before:
            return []
        detail = "; ".join(f"task {task} is {stopped[task]}" for task in sorted(self._stuck_on))
        self._owned.note(self._owned.record.stage, detail)
        if self._stuck_on - before and self._console.is_terminal:
            self._console.bell()
        return [f"the run waits: {detail}"] if detail else ["the stopped task was resumed"]

    def _keep_alive(self, run: Run) -> list[str]:
        is_over = any(child.succeeded for child in self._children) and _is_over(run)
        # this process saw them die, so there is no need to wait until their heartbeats are old
        news = [self._trainer.keep_alive("--take-over")]
        news.append(self._producer.keep_alive("--take-over", is_over=is_over))
        if self._server:
            news.append(self._server.keep_alive(self._owned.check))
        for child in (*self._judges, *self._workers):
            news.append(child.keep_alive(is_over=is_over))
        pids = [pid for child in self._children for pid in child.pids]
        self._journal.sample([*pids, *(self._server.pids if self._server else ())])
        return [line for line in news if line]

    # -- after ---------------------------------------------------------------

    def _stop_children(self) -> None:
        """Stop the children, the trainer first: the run continues from its checkpoint."""
        for child in self._children:
            child.terminate()
        begin = time.monotonic()
        shown = 0.0
        while left := [child for child in self._children if child.pid]:
            names = ", ".join(child.name for child in left)
            self._owned.note(Stage.STOPPING, f"waiting for {names}")
            waited_s = time.monotonic() - begin
            for child in left:
                if waited_s > (CHECKPOINT_S if child.name == "trainer" else STOP_S):
                    self._console.print(f"{child.name} does not stop; it is killed")
                    child.kill()
            if waited_s - shown >= LINE_S:
                shown = waited_s
                self._console.print(f"waiting for {names}, {waited_s:.0f} s")
            left[0].wait(POLL_S)

    def _report_stop(self, run: Run | None) -> None:
        """Print the account of a stopped run and how far it came."""
        if run is None:
            return
        run.store.deadline_s = 5.0  # for the account of the stopped run
        try:
            run.refresh_limits()
            run.janitor.sweep()
            account = account_line(run.account.fsck())
        except RolloutMQError as error:
            account = f"account not checked: {error.message}"
        steps = CheckpointFolder(self._folder / "checkpoints").steps()
        done = f"checkpoint of step {steps[-1]}" if steps else "no checkpoint yet"
        last = run.limits.steps
        self._owned.note(Stage.STOPPING, account=account, steps=last)
        self._console.print(f"stopped: {done} of {last} steps; {account}")
        self._console.print(f"rolloutmq web {self._where} opens it again", soft_wrap=True)


def _is_over(run: Run) -> bool:
    try:
        return run.control.state().mode is Mode.FINISH
    except RolloutMQError:  # the view shows it
        return False


def finish(console: Console, config: Config, run: Run, where: str) -> str:
    """Print the outcome, write the report, return the account in one line. Raises AccountError.

    `where`: the options by which other commands find the run.
    """
    folder = config.run.folder
    audit = run.account.fsck()
    evaluations = read_evaluations(folder)
    if evaluations:
        console.print(accuracy_table(evaluations))
    console.print(groups_table(audit.tasks))
    twice = RunFolder(folder).log.trained_twice()
    style = "green" if audit.clean and not twice else "bold red"
    console.print(f"{account_line(audit)} · trained twice {len(twice)}", style=style)
    page = folder / "report.html"
    if write_report(folder, page, account_line(audit)):
        console.print(f"report: {page}   steps: {folder / 'steps.jsonl'}", soft_wrap=True)
    console.print(f"logs: {folder / 'logs'}", soft_wrap=True)
    console.print("\nto open the run again:")
    activate = Path(sys.prefix) / "bin" / "activate"
    if activate.exists() and not shutil.which("rolloutmq"):
        console.print(f"  source {activate}", highlight=False, soft_wrap=True, markup=False)
    dead = ("dead",) if len(run.dead_letters) else ()
    for name in ("web", "status", *dead, "ls", "logs events", "fsck"):
        console.print(f"  rolloutmq {name} {where}", highlight=False, soft_wrap=True, markup=False)
    if not audit.clean or twice:
        what = [*audit.faults, *audit.lost[:5], *audit.doubled[:5], *list(twice)[:5]]
        raise AccountError("the account does not add up", hint="; ".join(what))
    return account_line(audit)


def account_line(audit: FsckReport) -> str:
    faults = f" · {audit.faults[0]}" if audit.faults else ""
    return f"account: lost {len(audit.lost)} · in two stages {len(audit.doubled)}{faults}"
