"""The Lua scripts, one file per state change under `lua/`, and what their calls are made of.

Each has its contract as header. A script gets the functions of `lua/shared/` that it names, and
those that these name: Lua creates all functions of a script anew in every call. There, a paragraph
is a function, or a value that several share.

A reply is a list of a status word (OK, or a refusal) and fields. A durable call waits for the
server's disk and for replicas (I6). WAIT and WAITAOF count the writes of their own connection, and
a repeated call may have made none, so a write of their own precedes them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any, NamedTuple, Protocol

from redis.exceptions import NoPermissionError, NoScriptError

from buffer.errors import Fenced, LostRun, RoleHeld, ScriptError
from buffer.redis.bulk_io import Command, send
from buffer.redis.keys import clock_beside
from buffer.redis.retry import NotDurable
from buffer.redis.script_contract import ScriptHeader

Arg = str | int | float | bytes | None  # None, for never or no limit, is sent as ""

TailArg = Arg | Mapping[str, Arg]  # or the arguments of a unit by name


class KeysByName(Protocol):
    """Keys of a script by the names in its header: `SlotKeys`, or a dictionary."""

    def __getitem__(self, slot: str, /) -> str: ...


_SHARED = "shared/"
_DECLARED = re.compile(r"^local (?:function )?(\w+(?:, \w+)*)", re.MULTILINE)
_NO_CODE = re.compile(r"--.*|'(?:\\.|[^'\\])*'")
_WORD = re.compile(r"(?<![.\w])[a-zA-Z_]\w*")


@dataclass(frozen=True)
class Script:
    name: str
    source: str
    header: ScriptHeader

    @cached_property
    def sha(self) -> str:
        """Return the hash by which EVALSHA names the script."""
        return hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    @cached_property
    def starts_work(self) -> bool:
        """Return whether a full server refuses this: it frees no memory, no work needs it (I12)."""
        return self.source.startswith("#!lua\n")

    def command(
        self,
        keys: KeysByName,
        args: Mapping[str, Arg],
        tail_keys: Sequence[str | KeysByName] = (),
        tail_args: Sequence[TailArg] = (),
    ) -> Command:
        """Return the EVALSHA of a call, in the order of the header. Raises ScriptError.

        `tail_keys` are keys, or the keys of a unit by name.
        """
        header = self.header
        names = header.fixed("ARGV")
        if len(names) != len(args) or not all(map(args.__contains__, names)):
            missing = set(names) - set(args)
            unknown = set(args) - set(names)
            raise ScriptError(
                f"{self.name}.lua: ARGV missing {sorted(missing)}, unknown {sorted(unknown)}"
            )
        if (tail_keys and not header.tail("KEYS")) or (tail_args and not header.tail("ARGV")):
            raise ScriptError(f"{self.name}.lua takes no more keys or arguments than it names")
        try:
            all_keys = [keys[slot] for slot in header.fixed("KEYS")]
            unit_slots = header.tail_names("KEYS")
            for unit in tail_keys:
                all_keys += [unit] if isinstance(unit, str) else [unit[slot] for slot in unit_slots]
        except KeyError as missing_key:
            raise ScriptError(f"{self.name}.lua: KEYS missing {missing_key}") from None
        values = [args[name] for name in names]
        names = header.tail_names("ARGV")
        for part in tail_args:
            if isinstance(part, Mapping) and part.keys() != set(names):
                wrong = sorted(part.keys() ^ set(names))
                raise ScriptError(f"{self.name}.lua: ARGV missing or unknown in a unit: {wrong}")
            values += [part[name] for name in names] if isinstance(part, Mapping) else [part]
        sent = ["" if value is None else value for value in values]
        return ("EVALSHA", self.sha, len(all_keys), *all_keys, *sent)


def words_of(code: str) -> list[str]:
    """Return the words of Lua code, each once; not those in comments, in texts, or behind dots."""
    return list(dict.fromkeys(_WORD.findall(_NO_CODE.sub("''", code))))


def shared_functions(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the paragraphs of `lua/shared/` by the names that they declare. Raises ScriptError."""
    found: dict[str, str] = {}
    for topic, text in texts.items():
        for paragraph in text.strip("\n").split("\n\n") if topic.startswith(_SHARED) else ():
            for names in _DECLARED.findall(paragraph):
                for name in names.split(", "):
                    if name in found:
                        raise ScriptError(f"lua/{topic}.lua declares {name}, as another file does")
                    found[name] = paragraph
    return found


def _link(code: str, shared: Mapping[str, str], linked: dict[str, None]) -> None:
    """Add the paragraphs that `code` names to `linked`, each behind those that it names itself."""
    for paragraph in [shared[word] for word in words_of(code) if word in shared]:
        if paragraph not in linked and paragraph != code:
            _link(paragraph, shared, linked)
            linked[paragraph] = None


def sources() -> dict[str, str]:
    """Return the files under `lua/` by name; those with functions are named `shared/<topic>`."""
    lua = resources.files("buffer") / "lua"
    found = {}
    for prefix, folder in (("", lua), (_SHARED, lua / "shared")):
        for file in folder.iterdir():
            if file.name.endswith(".lua"):
                found[prefix + file.name.removesuffix(".lua")] = file.read_text(encoding="utf-8")
    return found


def assemble(texts: Mapping[str, str]) -> dict[str, Script]:
    """Return scripts of name (first, so that SLOWLOG shows it), functions, checks, and body."""
    shared = shared_functions(texts)
    made = {}
    for name in [name for name in sorted(texts) if not name.startswith(_SHARED)]:
        shebang, _, body = texts[name].partition("\n")
        header = ScriptHeader.parse(texts[name])
        prologue = header.prologue()
        linked: dict[str, None] = {}
        _link(f"{prologue}\n{body}", shared, linked)
        parts = [f"-- rolloutmq {name}", f"local SCRIPT = '{name}'", *linked, prologue, body]
        made[name] = Script(name, "\n".join([shebang, *parts]), header)
    return made


@cache
def library() -> dict[str, Script]:
    return assemble(sources())


# -- replies and durability ------------------------------------------------------


def unknown_reply(script: str, reply: Sequence[Any]) -> ScriptError:
    return ScriptError(
        f"{script}: unknown reply {list(reply)}",
        hint="do all processes of the run have the same version of rolloutmq?",
    )


def unfenced(reply: list[str], role: str) -> list[str]:
    """Return the reply of a script that only the holder of a role may run. Raises Fenced."""
    status, *_ = reply
    if status == "FENCED":
        raise Fenced(f"this is no longer the {role} of the run: another one was opened")
    return reply


def opened(reply: list[str], role: str, run: str) -> list[str]:
    """Return the reply of trainer_open or producer_open. Raises LostRun or RoleHeld."""
    match reply:
        case ["LOST", found, *_]:
            holds = f"run {found[:8]}…" if found else "no run of that name"
            raise LostRun(
                f"this server holds {holds}, not the run {run!r} that this process knows",
                hint="connect to the server of this run, restore its data, or start a run with "
                "another name",
            )
        case ["HELD", silent_ms, *_]:
            raise role_held(role, run, int(silent_ms))
    return reply


def role_held(role: str, run: str, silent_ms: int) -> RoleHeld:
    return RoleHeld(
        f"run {run!r} has a {role} that was alive {silent_ms / 1000:.1f} s ago",
        hint="stop it, or open this one with take_over=True, which fences the other",
        command_hint="stop it, or start this one with --take-over, which fences the other",
    )


Advance = Callable[[str, int], object]
"""Receives the name of the current stage, and the number of items finished so far."""


def no_advance(what: str, done: int) -> None:
    """Ignore progress."""


WAIT_MS = 5_000
"""The longest wait for disk and replicas in one attempt; well below the socket's time-out."""


def waits_behind_script(replicas: int, disk: bool, sync: Script, key: str) -> list[Command]:
    """Return commands that follow a script on keys of a run, and wait for what it wrote.

    They wait until `replicas` replicas have it, and with `disk`, until it is on the server's disk.
    """
    # WAIT and not WAITAOF for replicas: they report their disks only once a second (measured:
    # 0.5 s a call)
    on_disk = [("WAITAOF", 1, 0, WAIT_MS)] if disk else []
    return [("EVALSHA", sync.sha, 1, clock_beside(key)), ("WAIT", replicas, WAIT_MS), *on_disk]


def check_durable(needed: int, answers: Sequence[Any]) -> None:
    """Raise NotDurable if the answers to these commands show that something is missing."""
    _, replicas, *disks = answers
    if [on_disk for on_disk, _ in disks] == [0]:
        raise NotDurable(f"not on the server's disk after {WAIT_MS} ms")
    if replicas < needed:
        raise NotDurable(f"only {replicas} of {needed} replicas have it after {WAIT_MS} ms")


class ScriptCall(NamedTuple):
    """A script by its name, with keys and arguments by the names in its header.

    See `Script.command`.
    """

    script: str
    keys: KeysByName
    args: Mapping[str, Arg]
    tail_keys: Sequence[str | KeysByName] = ()
    tail_args: Sequence[TailArg] = ()


def load_missing(client: Any, scripts: Iterable[Script], missing: NoScriptError) -> None:
    """Load the scripts that a server lacks. Raises `missing`, which is transient, without ACL."""
    named = list(scripts)
    try:
        # after a restart, a whole fleet finds that they are gone: most of it sends no source
        known = client.script_exists(*(script.sha for script in named))
        lacks = [script for script, is_known in zip(named, known, strict=True) if not is_known]
        send(client, [("SCRIPT", "LOAD", script.source) for script in lacks])
    except NoPermissionError:
        raise missing from None
