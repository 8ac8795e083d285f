"""The scripts' headers are contracts: they must agree with bodies, callers, and the key table (I13, I14)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import buffer.keys
from buffer.errors import ScriptError
from buffer.script_header import JUDGED, NAMED, Header, Slot
from buffer.scripts import Arg, assemble, includes, library, sources

BUFFER = Path(buffer.keys.__file__).parent
SOURCES = dict(sorted(sources().items()))
BODIES = {name: text for name, text in SOURCES.items() if not name.startswith("include/")}
TOPICS = {name.removeprefix("include/"): text for name, text in SOURCES.items() if name not in BODIES}
ROLES = {
    "batch": "batch",
    "batches": "batch",
    "group": "group",
    "groups": "group",
    "holders": "holds",
    "holds": "holds",
    "worker_records": "worker",
    "worker": "worker",
    "dead": "dead",
    "dead_letters": "dead:",
    "pool": "pool",
    "pools": "pool",
    "orders": "order",
    "order": "order",
    "completed": "pool",
    "aborted": "pool",
    "expired": "pool",
    "archived": "ended",
    "filtered": "ended",
    "dropped": "ended",
}
WRITES = r"'(H(SET|DEL|INCRBY\w*)|Z(ADD|REM)\w*|X(ADD|DEL)|S(ADD|REM|ET|ETBIT)|R?PUSH|L(TRIM|PUSH)|UNLINK|DEL|PERSIST)'"


def code_of(name: str) -> str:
    """The body without its comments."""
    return re.sub(r"--.*", "", SOURCES[name])


def functions_of(name: str) -> set[str]:
    """Names that a file declares for all of its lines, and for the files that include it."""
    declared = re.findall(r"^local (?:function )?(\w+(?:, \w+)*)", code_of(name), re.MULTILINE)
    return {name for names in declared for name in names.split(", ")}


def slots(name: str, array: str) -> list[Slot]:
    return [slot for slot in library()[name].header.slots if slot.array == array]


def table() -> dict[str, str]:
    """Key name to type, from the table in buffer/keys.py."""
    rows = re.findall(r"^ +rmq:\{run\}:(\S+) +([A-Z]+) ", buffer.keys.__doc__ or "", re.MULTILINE)
    return {re.sub(r"<.*", "", key).rstrip(":") + (":" if key == "dead:<gid>" else ""): kind for key, kind in rows}


def replies_of(name: str) -> set[str]:
    text = re.search(r"-- replies (.*?)\n-- keeps", BODIES[name], re.DOTALL)
    assert text, f"{name}.lua: no replies"
    return set(re.findall(r"(?:^|\| +)([A-Z_]+)\b", re.sub(r"\n--", "", text[1])))


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("kind", ["KEYS", "ARGV"])
def test_header_and_body_name_the_same_slots(name: str, kind: str) -> None:
    declared, code = slots(name, kind), code_of(name)
    assert [slot.first for slot in declared] == list(range(1, len(declared) + 1))
    fixed = {slot.first for slot in declared if not slot.is_tail}
    used = {int(n) for n in re.findall(rf"{kind}\[(\d+)\]", code)}
    computed = re.findall(rf"{kind}\[([a-z(][^\]]*|\d+ [^\]]*)\]", code)
    tails = [slot.first for slot in declared if slot.is_tail]
    handed_on = [int(n) for n in re.findall(rf"\b{kind}, (\d+)[,)]", code)]
    loops_over = {int(n) for n in re.findall(rf"for \w+ = (\d+), (?:#{kind}|\d+)", code)}
    assert used <= fixed
    assert fixed - used <= {n for n in fixed if any(start <= n for start in loops_over)} | _computed_from(computed)
    assert bool(computed) or set(handed_on) == set(tails)


def _computed_from(expressions: list[str]) -> set[int]:
    """Slots that `KEYS[3 + i]`, i from 1 to 3, means (check.lua)."""
    return {int(n) + i for text in expressions for n in re.findall(r"^(\d+) \+ i$", text) for i in (1, 2, 3)}


HOMES = {function: topic for topic in TOPICS for function in functions_of(f"include/{topic}")}


@pytest.mark.parametrize("name", SOURCES)
def test_file_includes_what_it_uses_and_nothing_else(name: str) -> None:
    code = re.sub(r"'[^']*'", "''", code_of(name))
    used = set(re.findall(r"(?<![.\w])\w+", code)) - functions_of(name)
    assert {HOMES[word] for word in used if word in HOMES} == set(includes(SOURCES[name]))


@pytest.mark.parametrize("topic", TOPICS)
def test_include_says_what_it_provides_and_is_used(topic: str) -> None:
    title, _, provided = TOPICS[topic].partition("\n")[0].removeprefix("-- ").partition(": ")
    assert title == topic
    assert functions_of(f"include/{topic}") - {"find", "call"} <= {topic, *re.findall(r"\w+", provided)}
    checks = {check for script in library().values() for check in script.header.checks()}
    assert topic in checks | {name for text in SOURCES.values() for name in includes(text)}


def test_each_function_is_declared_in_one_include() -> None:
    declared = [function for topic in TOPICS for function in functions_of(f"include/{topic}")]
    assert len(declared) == len(set(declared))


def test_include_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ScriptError, match=r"lua/include/nowhere\.lua"):
        assemble({**SOURCES, "beat": SOURCES["beat"].replace("-- include: ", "-- include: nowhere, ")})


@pytest.mark.parametrize("name", BODIES)
def test_locals_of_keys_are_named_as_in_the_header(name: str) -> None:
    names = {slot.first: slot.names[0] for slot in slots(name, "KEYS") if not slot.is_tail}
    for left, right in re.findall(r"^local ([\w, ]+) = (KEYS\[\d+\].*)$", code_of(name), re.MULTILINE):
        for local, value in zip(left.split(", "), right.split(", "), strict=True):
            if match := re.fullmatch(r"KEYS\[(\d+)\]", value.strip()):
                assert local == names[int(match[1])]


@pytest.mark.parametrize("name", BODIES)
def test_keys_and_types_are_those_of_the_key_table(name: str) -> None:
    known = table()
    for slot in slots(name, "KEYS"):
        for key, kind in zip(slot.names, slot.types, strict=True):
            role = ROLES.get(key) or key.partition("_")[0]
            assert role in known, f"{name}.lua: {key} is not in the table of buffer/keys.py"
            if kind == "prefix":
                line = re.search(rf"^-- KEYS\[{slot.first}\] .*\((\w+)\)$", BODIES[name], re.MULTILINE)
                assert line, f"{name}.lua: of which type are the keys with the prefix {key}?"
                kind = line[1]
            assert known[role] == kind.rstrip("*"), f"{name}.lua: {key} is a {known[role]}"


@pytest.mark.parametrize("name", BODIES)
def test_header_lists_exactly_the_replies_of_the_body(name: str) -> None:
    code = code_of(name)
    sent = set(re.findall(r"\{'([A-Z_]+)'", code)) | set(re.findall(r"reply\[1\] = '([A-Z_]+)'", code))
    sent |= set(re.findall(r"table\.insert\(reply, 1, '([A-Z_]+)'\)", code))
    assert replies_of(name) == sent


def test_every_script_has_a_caller_and_every_call_a_script() -> None:
    called = set()
    for path in BUFFER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "attr", "") in ("call", "call_many", "upload_and_call")
                and node.args
            ):
                first = node.args[0]
                called |= {first.value} if isinstance(first, ast.Constant) else set()
    # the store itself sends `sync` behind whatever is durable, a worker's control line its receipts
    assert called | {"sync", "receipt"} == set(BODIES) == set(library())


@pytest.mark.parametrize("name", BODIES)
def test_every_refusal_is_known_to_its_caller(name: str) -> None:
    # what is left to a general case: an error that shows the reply, or "nothing was done"
    general = {"commit": {"GAP", "UNKNOWN_TASK"}, "deregister": {"UNKNOWN"}, "reap": {"GRACE"}, "reissue": {"CLOSED"}}
    general |= {"check": set(), "totals": set()}
    general |= {"reassert": {"TAKEN", "DRAW"}, "reset_ledger": {"LIVE"}}
    general |= {"restore_batch": {"GAP", "GONE"}, "dissolve_batch": {"GAP", "ARCHIVED"}}
    shared = {"control", "job", "order_index", "draw_assertion"}
    sources = [p.read_text() for p in BUFFER.rglob("*.py") if f'"{name}"' in p.read_text() or p.stem in shared]
    quoted = {code for source in sources for code in re.findall(r'"([A-Z_]+)"', source)}
    assert replies_of(name) - {"OK"} - general.get(name, set()) <= quoted


def reads_of_payloads(source: str) -> set[str]:
    """Commands of a script that read a payload, or read without a bound."""
    commands = set(re.findall(r"call\('(\w+)'", re.sub(r"--.*", "", source)))
    return commands & {"GET", "MGET", "GETRANGE", "GETDEL", "KEYS", "SCAN", "HGETALL", "HVALS", "SMEMBERS", "HSCAN"}


@pytest.mark.parametrize("name", SOURCES)
def test_no_script_reads_payloads_or_walks_the_key_space(name: str) -> None:
    code = code_of(name)
    assert not reads_of_payloads(code)
    for slot in slots(name, "KEYS") if name in BODIES else []:
        if slot.names == ("payload",):
            on_payloads = set(re.findall(r"redis\.call\('(\w+)', KEYS\[(?:\d+ \+ )?i\]", code))
            assert on_payloads <= {"STRLEN", "EXISTS", "PERSIST"}


@pytest.mark.parametrize("name", BODIES)
def test_flags_let_scripts_that_free_memory_run_when_there_is_none(name: str) -> None:
    shebang = BODIES[name].partition("\n")[0]
    if name in {"claim", "create_run", "enqueue", "put", "reissue", "requeue", "update"}:
        assert shebang == "#!lua"
    elif name in {"check", "counts", "peek", "silent", "totals"}:
        assert shebang == "#!lua flags=no-writes"
        assert not re.search(WRITES, code_of(name))
    else:
        assert shebang == "#!lua flags=allow-oom"


@pytest.mark.parametrize("name", SOURCES)
def test_time_comes_from_the_server_and_nothing_is_random(name: str) -> None:
    assert not re.search(r"math\.random|os\.(time|clock)", code_of(name))


def test_arrange_refuses_names_that_are_not_in_the_header() -> None:
    script = library()["beat"]
    args: dict[str, Arg] = {"role": "trainer", "nonce": "n", "closing": 0, "waited_ms": 7}
    assert script.arrange({"control": "c"}, args) == (["c"], ["trainer", "n", 0, 7])
    with pytest.raises(ScriptError, match=r"beat.*missing \['nonce'\]"):
        script.arrange({"control": "c"}, {"role": "trainer", "closing": 0, "waited_ms": 7})
    with pytest.raises(ScriptError, match=r"unknown \['more'\]"):
        script.arrange({"control": "c", "more": "d"}, args)
    for tail in ({"tail_keys": ["k"]}, {"tail_args": ["a"]}):
        with pytest.raises(ScriptError, match="takes no more"):
            script.arrange({"control": "c"}, args, **tail)


def test_scripts_say_their_name_and_keep_their_hash() -> None:
    for name, script in library().items():
        assert script.source.split("\n")[1] == f"-- rolloutmq {name}"
        assert re.fullmatch("[0-9a-f]{40}", script.sha)
    assert len({script.sha for script in library().values()}) == len(BODIES)


def test_header_is_read_with_types_and_bounds() -> None:
    lines = [
        "#!lua",
        "-- KEYS[1] a  HASH*  of all",
        "-- KEYS[2] b  prefix of many (SET)",
        "-- KEYS[3+] c, d  LIST, ZSET x1..9",
    ]
    lines += ["-- ARGV[1] e  ''|0..  steps", "-- ARGV[2+] f, g  name, x|y xKEYS"]
    header = Header.parse("\n".join(lines))
    assert header.fixed("KEYS") == ("a", "b")
    assert header.tail("KEYS") == Slot("KEYS", 3, True, ("c", "d"), ("LIST", "ZSET"), 1, 9)
    assert header.fixed("ARGV") == ("e",)
    assert header.tail("ARGV") == Slot("ARGV", 2, True, ("f", "g"), ("name", "x|y"), 0, None)
    guard = header.guard()
    assert "is_int(ARGV[1], 0, 9007199254740991)" in guard
    assert "is_count(#KEYS - 2, 2, 1, 9)" in guard
    assert "ARGV[i + 1] == 'x'" in guard
    assert "call('ZCARD', KEYS[i + 1])" in guard
    assert "KEYS[1]" not in guard
    assert "KEYS[2]" not in guard
    assert [header.type_of(place) for place in range(1, 7)] == ["HASH", "PREFIX", "LIST", "ZSET", "LIST", "ZSET"]


@pytest.mark.parametrize(
    "line",
    [
        "-- KEYS[1] a",
        "-- KEYS[1] a  BITMAP",
        "-- KEYS[1+] a  HASH",
        "-- KEYS[1] a  HASH x1..2",
        "-- ARGV[1] a, b  name",
        "-- ARGV[1] a",
        "-- ARGV[1] a  groups at most",
        "-- ARGV[1+] a  name x1..",
    ],
)
def test_header_line_without_a_contract_is_refused(line: str) -> None:
    with pytest.raises(ScriptError, match="header"):
        Header.parse(f"#!lua\n{line}")


def test_every_named_type_is_known_and_used() -> None:
    defined = {topic.removeprefix("is_") for topic, text in TOPICS.items() if f"function {topic}(value)" in text}
    used = {word for name in BODIES for slot in slots(name, "ARGV") for kind in slot.types for word in kind.split("|")}
    assert defined == set(JUDGED)
    assert {*JUDGED, *NAMED} <= used
