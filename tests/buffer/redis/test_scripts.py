"""The scripts' headers are contracts with bodies, callers, and the key table (I13, I14)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import buffer.redis.keys
from buffer.errors import ScriptError
from buffer.redis.key_table import TABLE
from buffer.redis.keys import SLOTS, Keys
from buffer.redis.script_contract import BIGGEST, JUDGED, NAMED, ScriptHeader, Slot
from buffer.redis.scripts import Arg, Script, assemble, library, shared_functions, sources
from buffer.redis.server.check import check_all
from buffer.redis.store import Store
from buffer.run.open import can_wait_for_disk
from tests.buffer.busy_run import busy_run, moves
from tests.servers import raw_client

BUFFER = Path(buffer.redis.keys.__file__).parents[1]
MODULES = sorted(BUFFER.rglob("*.py"))
SOURCES = dict(sorted(sources().items()))
BODIES = {name: text for name, text in SOURCES.items() if not name.startswith("shared/")}
SHARED = shared_functions(SOURCES)
WRITES = r"'(H(SET|DEL|INCRBY\w*)|Z(ADD|REM)\w*|X(ADD|DEL)|S(ADD|REM|ET|ETBIT)|R?PUSH|L(TRIM|PUSH)|UNLINK|DEL|PERSIST)'"


def code_of(name: str) -> str:
    """Return the body without its comments."""
    return re.sub(r"--.*", "", SOURCES[name])


def slots(name: str, array: str) -> list[Slot]:
    return [slot for slot in library()[name].header.slots if slot.array == array]


def table() -> dict[str, str]:
    apart = ("dead:<gid>", "weights:<lineage>:<version>")  # beside a key of the same name
    return {
        re.sub(r"<.*", "", key).rstrip(":") + (":" if key in apart else ""): row.type
        for key, row in TABLE.items()
    }


def calls_of(code: str, function: str) -> Iterator[list[str]]:
    for match in re.finditer(re.escape(function) + r"\(", code):
        depth, start, found = 1, match.end(), []
        for place in range(start, len(code)):
            depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(code[place], 0)
            if depth == 0 or (depth == 1 and code[place] == ","):
                found.append(code[start:place].strip())
                start = place + 1
            if depth == 0:
                break
        yield found


@pytest.mark.parametrize("name", BODIES)
def test_integers_that_redis_might_write_as_a_power_of_ten_are_written_by_int(name: str) -> None:
    large = set()
    # units that only an include walks are no locals here
    for slot in (
        s for s in slots(name, "ARGV") if not s.is_tail or " in each_unit do" in code_of(name)
    ):
        for word, kind in zip(slot.names, slot.types, strict=True):
            if bounds := re.search(r"(?:^|\|)[\d_]+\.\.([\d_]*)", kind):
                large |= {word} if int(bounds[1] or BIGGEST) >= 10**8 else set()
    for function in ("redis.call", "log_event"):
        for arguments in calls_of(code_of(name), function):
            assert not large & set(arguments)


@pytest.mark.parametrize("name", BODIES)
def test_body_uses_every_name_of_the_header_and_no_number(name: str) -> None:
    code = code_of(name)
    assert not re.search(r"\b(KEYS|ARGV)\b", code)
    words = set(re.findall(r"\w+", re.sub(r"'[^']*'", "''", code)))
    tails = [tail for array in ("KEYS", "ARGV") if (tail := library()[name].header.tail(array))]
    walks = "each_unit" in code or "in ipairs(units)" in code
    of_units = {unit for tail in tails if walks for unit in tail.names}
    names = {
        word for array in ("KEYS", "ARGV") for slot in slots(name, array) for word in slot.names
    }
    assert names - of_units <= words
    assert not names & {*SHARED, "redis", "string", "table", "math"}


OF_LUA = {"ipairs", "pairs", "tonumber", "tostring", "unpack", "function"}


@pytest.mark.parametrize("name", SOURCES)
def test_every_function_that_is_called_exists(name: str) -> None:
    code = code_of(name)
    called = set(re.findall(r"(?<![.\w])(\w+)\(", re.sub(r"'[^']*'", "''", code)))
    declared = re.findall(r"local function (\w+)", code) + re.findall(r"\b(\w+) = function", code)
    words = {"and", "or", "if", "in", "return", "not", "elseif", "while"}
    assert called - words <= {*declared, *SHARED, *OF_LUA}


def test_script_has_the_functions_that_it_names_and_no_other() -> None:
    for name, script in library().items():
        code = re.sub(r"--.*", "", script.source)
        declared = re.findall(r"^local function (\w+)", code, re.MULTILINE)
        assert [each for each in declared if len(re.findall(rf"\b{each}\b", code)) < 2] == [], name


"""The checks of headers name them."""


@pytest.mark.parametrize("name", BODIES)
def test_header_lists_exactly_the_replies_of_the_body(name: str) -> None:
    code = code_of(name)
    listed = re.search(r"-- replies (.*?)\n-- keeps", BODIES[name], re.DOTALL)
    assert listed
    replies = re.findall(r"(?:^|\| +)([A-Z_]+)\b", re.sub(r"\n--", "", listed[1]))
    code = re.sub(r"--.*", "", library()[name].source)  # with functions that answer for several
    sent = re.findall(r"(?:\{|reply\[1\] = |refused\(|table\.insert\(reply, 1, )'([A-Z_]+)'", code)
    assert set(replies) == set(sent)


def test_function_that_two_files_declare_is_refused() -> None:
    with pytest.raises(ScriptError, match="declares num, as another file does"):
        assemble({**SOURCES, "shared/more": "-- more: x.\n\nlocal function num() end\n"})


FACTS: dict[str, str | int] = {
    "task": "t", "lane": "fresh", "status": "completed", "worker": "w", "gid": "t-0000000001",
    "lineage": "l0", "version": 1,
}  # fmt: skip
LISTS = {"payloads": "payload", "prompts": "payload"}


def kind_of_key(slot: str) -> str:
    if slot in LISTS:
        return LISTS[slot]
    key = Keys("demo").slots(**FACTS, step=1)[slot].removeprefix("rmq:{demo}:")
    kind, _, rest = key.partition(":")
    return f"{kind}:" if key == "dead:" or (kind == "weights" and rest) else kind


@pytest.mark.parametrize("name", BODIES)
def test_keys_and_types_are_those_of_the_key_table(name: str) -> None:
    known = table()
    for slot in slots(name, "KEYS"):
        for key, kind in zip(slot.names, slot.types, strict=True):
            role = kind_of_key(key)
            assert role in known, f"{name}.lua: {key} is not in the table of buffer/redis/keys.py"
            assert kind == "prefix" or known[role] == kind.rstrip("*"), f"{name}.lua: {key}"


def test_every_slot_of_the_keys_is_named_by_a_script() -> None:
    named = {key for name in BODIES for slot in slots(name, "KEYS") for key in slot.names}
    assert set(SLOTS) <= named


def test_key_that_is_unknown_or_lacks_a_fact_is_refused() -> None:
    with pytest.raises(ScriptError, match="no key is named 'nothing'"):
        Keys("demo").slots()["nothing"]
    with pytest.raises(ScriptError, match="'progress' of a script needs its task"):
        Keys("demo").slots(worker="w")["progress"]


def test_every_script_has_a_caller_and_every_call_a_script() -> None:
    first_arguments = set()
    called = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                    first_arguments.add(name)
                    words = (getattr(function, "attr", ""), getattr(function, "id", ""))
                    if words[0] == "call" or words[1] == "ScriptCall":
                        called.add(name)
    assert called <= set(BODIES) == set(library())
    # the store itself calls `sync` behind durable writes, a control connection its receipts
    assert set(BODIES) - {"sync", "receipt"} <= first_arguments


def reads_of_payloads(source: str) -> set[str]:
    # what one worker holds is bounded by its capacity, and its totals by the tasks
    commands = set(
        re.findall(r"call\('(\w+)'(?!, (?:leased|worker_tokens)\))", re.sub(r"--.*", "", source))
    )
    return commands & {
        "GET", "MGET", "GETRANGE", "GETDEL", "KEYS", "SCAN", "HGETALL", "HVALS", "SMEMBERS",
        "HSCAN",
    }  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_no_script_reads_payloads_or_walks_the_key_space(name: str) -> None:
    code = code_of(name)
    assert not reads_of_payloads(code)
    for slot in slots(name, "KEYS") if name in BODIES else []:
        if slot.names in (("payloads",), ("prompts",)):
            on_payloads = set(re.findall(rf"redis\.call\('(\w+)', {slot.names[0]}\[", code))
            assert on_payloads <= {"STRLEN", "EXISTS", "PERSIST"}


@pytest.mark.parametrize("name", BODIES)
def test_flags_let_scripts_that_free_memory_run_when_there_is_none(name: str) -> None:
    shebang = BODIES[name].partition("\n")[0]
    if name in {
        "claim",
        "create_run",
        "enqueue",
        "keep_responses",
        "keep_turns",
        "keep_verdict",
        "put",
        "reissue",
        "requeue",
        "update",
    }:
        assert shebang == "#!lua"
    elif name in {"check", "check_leased", "counts", "peek", "silent", "tokens", "totals"}:
        assert shebang == "#!lua flags=no-writes"
        assert not re.search(WRITES, code_of(name))
    else:
        assert shebang == "#!lua flags=allow-oom"


@pytest.mark.parametrize("name", SOURCES)
def test_time_comes_from_the_server_and_nothing_is_random(name: str) -> None:
    assert not re.search(r"math\.random|os\.(time|clock)", code_of(name))


def test_command_refuses_names_that_are_not_in_the_header() -> None:
    lines = [
        "#!lua",
        "-- KEYS control  HASH",
        "-- ARGV role  trainer|producer",
        "-- ARGV step  0..",
    ]
    script = Script("demo", "", ScriptHeader.parse("\n".join(lines)))
    args: dict[str, Arg] = {"role": "trainer", "step": 7}
    assert script.command({"control": "c"}, args)[2:] == (1, "c", "trainer", 7)
    with pytest.raises(ScriptError, match=r"demo.*missing \['step'\]"):
        script.command({"control": "c"}, {"role": "trainer"})
    with pytest.raises(ScriptError, match=r"unknown \['more'\]"):
        script.command({"control": "c"}, {**args, "more": 1})
    with pytest.raises(ScriptError, match=r"KEYS missing 'control'"):
        script.command({}, args)
    for tail in ({"tail_keys": ["k"]}, {"tail_args": ["a"]}):
        with pytest.raises(ScriptError, match="takes no more"):
            script.command({"control": "c"}, args, **tail)


def test_header_is_read_with_types_and_bounds() -> None:
    lines = [
        "#!lua",
        "-- KEYS a  HASH*  of all",
        "-- KEYS b  prefix of many (SET)",
        "-- KEYS c, d  LIST, ZSET x1..9",
    ]
    lines += ["-- ARGV e  ''|0..  steps", "-- ARGV f  0|1", "-- ARGV g, h  name, 1..9 xKEYS"]
    header = ScriptHeader.parse("\n".join(lines))
    assert header.fixed("KEYS") == ("a", "b")
    assert header.tail("KEYS") == Slot("KEYS", 3, True, ("c", "d"), ("LIST", "ZSET"), 1, 9)
    assert header.fixed("ARGV") == ("e", "f")
    assert header.tail("ARGV") == Slot("ARGV", 3, True, ("g", "h"), ("name", "1..9"), 0, None)


@pytest.mark.parametrize(
    "line",
    [
        "-- KEYS a", "-- KEYS a  BITMAP", "-- KEYS a, b  HASH, HASH", "-- KEYS a, b  HASH x1..2",
        "-- KEYS[1] a  HASH", "-- ARGV a, b  name", "-- ARGV a", "-- ARGV a  groups at most",
        "-- ARGV a  name x1..", "-- ARGV a  name x1..2\n-- ARGV b  name",
    ],
)  # fmt: skip
def test_header_line_without_a_contract_is_refused(line: str) -> None:
    with pytest.raises(ScriptError, match=r"header|nothing follows a tail"):
        ScriptHeader.parse(f"#!lua\n{line}")


def test_every_named_type_is_known_and_used() -> None:
    defined = {
        name.removeprefix("is_")
        for name, text in SHARED.items()
        if name.startswith("is_") and f"function {name}(value)" in text
    }
    used = {
        word
        for name in BODIES
        for slot in slots(name, "ARGV")
        for kind in slot.types
        for word in kind.split("|")
    }
    assert defined == set(JUDGED)
    assert {*JUDGED, *NAMED} <= used


NEEDED = ("EVALSHA", "SCRIPT", "INFO", "CLIENT")


def use(url: str) -> None:
    """What processes of a run do: first contact, and nearly every script."""
    store = Store(url, deadline_s=5.0)
    try:
        store.retrying("first contact", lambda: store.servers.is_cluster)
        store.retrying("first contact", lambda: can_wait_for_disk(store))
        store.retrying("first contact", lambda: check_all(store.servers))
        with raw_client(url) as client:
            scene = busy_run(store, client, "demo")
            for move in moves(scene).values():
                move()
            scene.run.account.fsck()
    finally:
        store.close()
