"""Every error of the project, as one tree.

    RolloutMQError                      1  something failed
    ├── ConfigError                     2  a config file, a flag or a data set is wrong
    │   ├── DatasetError                2  a line of a data set cannot be used
    │   └── QueryError                  2  a question about groups that cannot be asked
    ├── StoreError                      3  the Redis server
    │   ├── StoreUnavailable            3  no answer in time; the operation may be tried again
    │   │   └── StoreFull               3  it answers, but its memory is full: nothing new is started
    │   ├── StoreUnsafe                 3  too old, or set up so that it would lose data
    │   └── ScriptError                 1  a script said something that no caller knows: a bug
    ├── ModelError                      4  a model folder, an engine or weights cannot be loaded
    ├── RunError                        5  this run cannot be opened like that
    │   ├── RunExists                   5  the name is taken by another run
    │   ├── RunNotFound                 5  no such run on this server
    │   ├── LostRun                     5  the server is not the one the checkpoint knows
    │   ├── RoleHeld                    5  another trainer or producer still beats
    │   └── ProducerGone                5  a batch is awaited, and nobody produces
    ├── Fenced                          5  somebody newer holds what this process held
    ├── GroupHeld                       1  a group that cannot be moved by hand: it runs, is in a batch, has ended
    ├── LedgerError                     1  a step that cannot be taken or committed
    │   ├── CheckpointNow               1  memory is full of batches that only a checkpoint frees
    │   ├── ExpiredBatch                1  the newest weights cannot serve the step: newer ones must be published first
    │   └── NoBatch                     1  nobody works on the step, and nobody will
    ├── PauseTimeout                    1  some worker did not confirm a pause
    ├── WireError                       1  bytes that are not a group
    │   └── SchemaVersionError          1  written by another version
    ├── MemoryFull                      1  the run holds as many payload bytes as it may
    ├── PayloadMissing                  1  an index entry without its bytes
    ├── MediaError                      1  a file that a payload refers to: missing, too large, not what it should be
    ├── SnapshotError                   1  a folder that is no whole snapshot, or a run that moved while it was copied
    ├── JudgeError                      1  a judge raised or returned nonsense
    └── AccountError                    6  the account of groups does not add up

The number is the exit code of the command. 0 is done, 130 is interrupted by Ctrl-C.
"Empty", "not ready" and "paused" are results, not errors.
"""

from __future__ import annotations


class RolloutMQError(Exception):
    """Base of all errors. `hint` says what to do; `exit_code` is what the command exits with."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(RolloutMQError):
    """A config file or a flag is wrong: what, where, and what would be right."""

    exit_code = 2


class DatasetError(ConfigError):
    """A line of a data set cannot be used: file, line number, reason."""


class QueryError(ConfigError):
    """A question about groups cannot be asked like that: what is wrong, and what is allowed."""


class StoreError(RolloutMQError):
    """The Redis or Valkey server."""

    exit_code = 3


class StoreUnavailable(StoreError):
    """No answer before the deadline. Every operation of this project may be tried again (I13)."""


class StoreFull(StoreUnavailable):
    """The server is at its maxmemory. What frees memory or ends work goes on; what starts work is
    refused (I12).
    """


class StoreUnsafe(StoreError):
    """The server is too old, or its settings would lose data."""


class ScriptError(StoreError):
    """A script answered something its caller does not know."""

    exit_code = 1


class ModelError(RolloutMQError):
    """A model folder, an engine or a set of weights cannot be loaded."""

    exit_code = 4


class RunError(RolloutMQError):
    """This run cannot be opened like that."""

    exit_code = 5


class RunExists(RunError):
    """The name is taken by another run on this server."""


class RunNotFound(RunError):
    """No such run on this server."""


class LostRun(RunError):
    """The server holds no run, or another run than the checkpoint knows (I6)."""


class RoleHeld(RunError):
    """Another trainer or producer of this run still beats (I7)."""


class ProducerGone(RunError):
    """A trainer waits for a batch, and the producer that should start its groups is dead, without a
    standby.
    """


class Fenced(RolloutMQError):
    """Somebody newer holds what this process held; nothing was changed (I2, I7)."""

    exit_code = 5


class GroupHeld(RolloutMQError):
    """A group that nobody may move by hand: it runs, is in a batch, has ended, or never was (I1)."""


class LedgerError(RolloutMQError):
    """A train step that cannot be taken, committed or reopened like that (I5, I6)."""


class CheckpointNow(LedgerError):
    """Memory is full of batches that were taken and that only a checkpoint and its commit free
    (I12).
    """


class ExpiredBatch(LedgerError):
    """Nothing is ready for a step, and the newest weights are too old to make it: publish those of
    the step before, then take it again.
    """


class NoBatch(LedgerError):
    """Nothing is ready for a step, nobody works on it, and newer weights that could change that are
    not there.
    """


class PauseTimeout(RolloutMQError):
    """Some worker did not confirm a pause in time (I10)."""


class WireError(RolloutMQError):
    """Bytes that do not decode to a group: what and where in the document."""


class SchemaVersionError(WireError):
    """A group written by another schema version: got and supported."""


class MemoryFull(RolloutMQError):
    """The run holds as many payload bytes as it may; what is taken, trained and committed makes
    room (I12).
    """


class PayloadMissing(RolloutMQError):
    """An index entry whose bytes are gone."""


class MediaError(RolloutMQError):
    """A file that a payload refers to cannot be used: missing, too large, a link, or no image."""


class SnapshotError(RolloutMQError):
    """A folder that is no whole snapshot, or a run that did not stand still while its index was
    copied.
    """


class TaskStopped(RolloutMQError):
    """Too many tries of a task failed one after the other: nothing more of it is started (I11)."""

    exit_code = 5


class GroupTimeout(RolloutMQError):
    """A group took longer than its task allows."""


class JudgeError(RolloutMQError):
    """A judge raised, or returned something that is not a reward."""


class AccountError(RolloutMQError):
    """The account of groups does not add up: something was lost or doubled (I1)."""

    exit_code = 6
