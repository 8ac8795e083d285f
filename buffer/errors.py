"""Every error of the project, as one tree. `exit_code` is the exit code of the command.

Exit code 0 is success. "Empty", "not ready" and "paused" are results, not errors.
"""

from __future__ import annotations

from collections.abc import Sequence

INTERRUPTED = 130
"""Exit code of a process that a signal stopped before the run was over: to be replaced."""


class RolloutMQError(Exception):
    """The base of all errors.

    `hint` says what to do, in Python names where a program can do it; `command_hint` uses flags.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", command_hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.command_hint = command_hint or hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


LONGEST_REASON = 300
"""Characters of an exception's text in a reason."""


def text_of(error: BaseException) -> str:
    """Return the text of any error, also of a user's error whose `__str__` raises."""
    try:
        return "".join(str(error)).encode(errors="replace").decode()
    except BaseException as fault:  # also SystemExit: it ends nothing
        return f"(its text raises {type(fault).__name__})"


def describe(error: BaseException) -> str:
    """Return an error in one line: its type and the start of its text."""
    text = " ".join(text_of(error).split())
    name = type(error).__name__
    return f"{name}: {text[:LONGEST_REASON]}" if text else name


class ConfigError(RolloutMQError):
    """A config file or a flag is wrong; the text says what would be right."""

    exit_code = 2


_NEXT = "\n  "


def raise_together(errors: Sequence[RolloutMQError]) -> None:
    """Raise a single error as it is, several as one ConfigError, and nothing without errors."""
    if len(errors) == 1:
        raise errors[0]
    # one of them may be several already
    lines = [line for error in errors for line in str(error).split(_NEXT)[_NEXT in str(error) :]]
    if distinct := list(dict.fromkeys(lines)):
        raise ConfigError(_NEXT.join([f"{len(distinct)} problems", *distinct]))


class DatasetError(ConfigError):
    """A line of a data set cannot be used."""


class HubError(ConfigError):
    """A model or data set of the Hugging Face Hub is not here, and cannot be downloaded."""


class QueryError(ConfigError):
    """A query about groups is not valid."""


class StoreError(RolloutMQError):
    """The Redis or Valkey server refuses a command, or cannot be used."""

    exit_code = 3


class StoreUnavailable(StoreError):
    """The server did not answer in time. Every operation may be repeated (I13)."""


class StoreFull(StoreUnavailable):
    """The server is at its maxmemory: it accepts only what frees memory or ends work (I12)."""


class StoreUnsafe(StoreError):
    """The server is too old, or its settings would lose data."""


class ScriptError(StoreError):
    """A script refused its keys or arguments, or its caller does not know its reply."""

    exit_code = 1


class ModelError(RolloutMQError):
    """A model folder, an engine or a set of weights cannot be loaded."""

    exit_code = 4


class WeightsRefused(ModelError):
    """No live worker can load the published weights, so no group is generated."""


class RunError(RolloutMQError):
    """This run cannot be opened like that."""

    exit_code = 5


class RunExists(RunError):
    """Another run on this server has that name."""


class RunNotFound(RunError):
    """No run on this server has that name."""


class LostRun(RunError):
    """The server holds no run, or another run than the checkpoint knows (I6)."""


class RunDamaged(RunError):
    """A key of the run is gone, or holds what no process of rolloutmq writes: which, and what."""


class RoleHeld(RunError):
    """Another trainer, producer, or worker of that id still sends heartbeats (I7)."""


class ProducerGone(RunError):
    """A trainer waits for a batch, and there is no producer to start its groups."""


class Fenced(RolloutMQError):
    """A newer process holds what this process held; nothing was changed (I2, I7)."""

    exit_code = 5


class GroupHeld(RolloutMQError):
    """A group may not be moved by hand: it runs, is in a batch, has ended, or is unknown (I1)."""


class LedgerError(RolloutMQError):
    """A train step cannot be taken, committed or reopened like that (I5, I6)."""


class CheckpointNow(LedgerError):
    """Memory is full of taken batches, which only a checkpoint and its commit free (I12)."""


class ExpiredBatch(LedgerError):
    """No group is ready for a step, and the newest weights are too old to generate one.

    Publish the weights of the step before, then take it again.
    """


class NoBatch(LedgerError):
    """No group is ready or running for a step, and no newer weights could change that."""

    exit_code = 5


class StepFailed(RolloutMQError):
    """A rank of the trainer cannot read its share of a step, which is delivered again."""


class RankLost(RolloutMQError):
    """Another rank of the trainer ended, so no step can be completed; its log has the reason."""

    exit_code = 7


class PublicationFailed(RolloutMQError):
    """Weights could not be published beside a train step; the old ones stay announced."""


class PauseTimeout(RolloutMQError):
    """A worker did not confirm a pause in time (I10)."""


class WireError(RolloutMQError):
    """These bytes do not decode to a group."""


class SchemaVersionError(WireError):
    """A group was written with another schema version."""


class MemoryFull(RolloutMQError):
    """The run holds as many payload bytes as it may; committed batches make room (I12)."""


class PayloadMissing(RolloutMQError):
    """An index entry refers to bytes that are gone."""


class SnapshotError(RolloutMQError):
    """A folder is not a whole snapshot, or a run changed while its index was copied."""


class TaskStopped(RolloutMQError):
    """A needed task starts no groups until it is resumed, and this process does not wait (I11)."""

    exit_code = 5


class GradientNotFinite(RolloutMQError):
    """The gradients of too many optimizer steps in a row were not finite; no weight was changed."""

    exit_code = 5


class GroupChanged(RolloutMQError):
    """Columns of a received group changed in this process: what was made of it is not right."""

    exit_code = 5


class GroupTimeout(RolloutMQError):
    """A group took longer than its task allows."""


class UserCodeError(RolloutMQError):
    """A user's function raised, exceeded its limit, ended its process, or returned rubbish.

    `told`: the same for the model, as the result of a tool. `trace`: the traceback of the user's
    code (`buffer.failure_text`), "" if it raised nothing.
    """

    def __init__(self, message: str, *, hint: str = "", told: str = "", trace: str = "") -> None:
        super().__init__(message, hint=hint)
        self.told = told or message
        self.trace = trace


class ProcessUnavailable(RolloutMQError):
    """No process could be started for a user's function: a fault of the machine or the set-up."""


class NoAnswer(RolloutMQError):
    """Another server did not answer in time, or the connection to it broke."""


class ServiceAway(NoAnswer):
    """A server that a call needs refuses connections or has no room: the call is made again."""


class JudgeError(UserCodeError):
    """A judge raised, exceeded its limit, or returned something that is not a reward."""


class AnswerTooLong(JudgeError):
    """A service that judges, or runs programs, sent more than is read."""


class GroupAbandoned(RolloutMQError):
    """Nobody wants the group any more: its worker drops it."""


class Skip(RolloutMQError):
    """Raise it where a prompt makes no sense: its group ends, and another draw takes its place.

    A page is gone, an answer cannot be verified: neither a zero nor a failure. Record functions,
    judges, filters, agent loops, agents, tools and environments may raise it; a service answers
    {"skip": "reason"}. (XTuner v1's status SKIPPED.)
    """

    def __init__(self, reason: str = "no reason was given") -> None:
        text = " ".join(str(reason).split())
        super().__init__(text.encode(errors="replace").decode()[:LONGEST_REASON])


class JudgeInterrupted(RolloutMQError):
    """A pause, or the end of its worker, ended a judge; its rollout is judged later."""


class SandboxUnavailable(ConfigError):
    """Programs of a model cannot be caged on this machine: what to install, or to permit."""


class AccountError(RolloutMQError):
    """The account of groups does not add up: something was lost or doubled (I1)."""

    exit_code = 6
