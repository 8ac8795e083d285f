"""A store for tests: it repeats calls, dies behind one, or shows each before it is made.

A repeated call is one whose reply was lost: the second time must change nothing (I13).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import redis

from buffer.redis.bulk_io import Command
from buffer.redis.scripts import Arg, Script, ScriptCall, library
from buffer.redis.store import Store
from tests.buffer.keyspace import changed, dump

T = TypeVar("T")

MUTATING = sorted(
    name for name, script in library().items() if "no-writes" not in script.source.split("\n")[0]
)


class Died(BaseException):
    """What no code catches."""


class FaultyStore(Store):
    """Repeats the scripts named in `repeats`, and compares the key space of `run` before and after.

    A subclass with `one_by_one` makes each call by itself: `look` is told of it first, with its
    keys and arguments as the server gets them; its script is loaded.

    What works in slices is repeated where a slice was the last one: the one before is repeated by
    its caller.
    """

    one_by_one = False
    lives = 0
    """exchanges with the server until the process dies; 0: it does not"""

    def __init__(
        self,
        url: str,
        raw: redis.Redis | None = None,
        *,
        run: str = "",
        repeats: Sequence[str] = (),
    ) -> None:
        super().__init__(url, deadline_s=10.0)
        self.raw: Any = raw
        self.run = run
        self.repeats = repeats
        # shared with the copies of this store for other nodes
        self.echoes = Counter[str]()
        self.replies = Counter[str]()
        """`script STATUS` of those that may change something"""
        self.has_died = False
        self._dies_in = "nothing"
        self._calls_left = 0

    def send(
        self,
        what: str,
        commands: Sequence[Command | ScriptCall],
        *,
        durable: bool = False,
        starts_work: bool = False,
    ) -> list[Any]:
        if self.one_by_one and len(commands) > 1:
            return [self.send(what, [command], durable=durable)[0] for command in commands]
        commands = [self._shown(command) for command in commands]
        answers = super().send(what, commands, durable=durable, starts_work=starts_work)
        if self.repeats and all(command[0] in ("SET", "UNLINK") for command in commands):
            super().send(what, commands)
        repeats, is_whole = False, True
        for call, reply in zip(commands, answers, strict=True):
            if isinstance(call, ScriptCall):
                self._note(call.script, reply)
                repeats = repeats or call.script in self.repeats
                is_whole = is_whole and not has_more(call.script, call.args, reply)
        if repeats and is_whole:
            with self._nothing_changes(what):
                again = super().send(what, commands, durable=durable)
            for call, reply, second in zip(commands, answers, again, strict=True):
                # who left has left: UNKNOWN is as good as OK then
                if isinstance(call, ScriptCall) and call.script != "deregister":
                    statuses = slice(0, None, 2) if call.script == "submit" else slice(1)
                    assert second[statuses] == reply[statuses], (call, reply, second)
        return answers

    def _shown(self, command: Command | ScriptCall) -> Command | ScriptCall:
        if not isinstance(command, ScriptCall):
            return command
        if self.one_by_one:
            entry = library()[command.script]
            self.raw.script_load(entry.source)
            sent: list[Any] = list(entry.command(*command[1:]))
            _, _, count, *rest = sent
            self.look(entry, rest[:count], rest[count:])
        if command.script == self._dies_in or not self._dies_in:
            return command._replace(args=self._come_nearer_to_death(command.args))
        return command

    def look(self, script: Script, keys: list[str], args: list[Arg]) -> None:
        """Receive a call that is about to be made."""

    def retrying(
        self,
        what: str,
        operation: Callable[[], T],
        *,
        deadline_s: float | None = None,
        starts_work: bool = False,
    ) -> T:
        answer = super().retrying(what, operation, deadline_s=deadline_s, starts_work=starts_work)
        if self.lives:
            self.lives -= 1
            if not self.lives:
                raise Died
        return answer

    @contextmanager
    def dying(self, script: str, calls: int) -> Iterator[None]:
        """Inside, the process dies behind so many calls of a script ("": of any), each of one
        group; `has_died` says whether there were more to come.
        """
        self.has_died = False
        self._dies_in = script
        self._calls_left = calls
        with suppress(Died):
            yield
        self._dies_in = "nothing"

    def _note(self, script: str, reply: Sequence[Any]) -> None:
        if script in MUTATING:
            self.replies[f"{script} {reply[0]}"] += 1

    def _come_nearer_to_death(self, args: Mapping[str, Arg]) -> Mapping[str, Arg]:
        if self._calls_left == 0:
            self.has_died = True
            raise Died
        self._calls_left -= 1
        return {**args, "limit": 1} if "limit" in args else args

    @contextmanager
    def _nothing_changes(self, script: str) -> Iterator[None]:
        before = dump(self.raw, self.run)
        yield
        assert changed(before, dump(self.raw, self.run)) == {}, script
        self.echoes[script] += 1


def has_more(script: str, args: Mapping[str, Arg], reply: Sequence[Any]) -> bool:
    """Whether this slice was not the last one."""
    if reply[0] != "OK":
        return False
    match script:
        case "expire" | "reissue" | "rescore" | "reap":
            return int(reply[1]) >= int(args["limit"] or 0)
        case "commit":
            return int(reply[2]) < int(args["keep"] or 0)
        case "forget":
            return int(reply[2]) > 0
    return False
