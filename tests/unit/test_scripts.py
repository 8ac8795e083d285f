"""The scripts' headers are contracts: they must agree with bodies, callers, and the key table (I13, I14)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import buffer.keys
from buffer.errors import ScriptError
from buffer.scripts import Arg, library

BUFFER = Path(buffer.keys.__file__).parent
BODIES = {path.stem: path.read_text() for path in sorted((BUFFER / "lua").glob("*.lua")) if path.stem != "prelude"}
PRELUDE = (BUFFER / "lua" / "prelude.lua").read_text()
SLOT = re.compile(r"^-- (KEYS|ARGV)\[(\d+)(\+?)\] +(.*)$", re.MULTILINE)
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
    return re.sub(r"--.*", "", BODIES[name])


def slots(name: str, kind: str) -> list[tuple[int, bool, str]]:
    return [(int(n), bool(plus), text) for k, n, plus, text in SLOT.findall(BODIES[name]) if k == kind]


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
    assert [number for number, _, _ in declared] == list(range(1, len(declared) + 1))
    fixed = {number for number, tail, _ in declared if not tail}
    used = {int(n) for n in re.findall(rf"{kind}\[(\d+)\]", code)}
    computed = re.findall(rf"{kind}\[([a-z(][^\]]*|\d+ [^\]]*)\]", code)
    has_tail = any(tail for _, tail, _ in declared)
    loops_over = {int(n) for n in re.findall(rf"for \w+ = (\d+), (?:#{kind}|\d+)", code)}
    assert used <= fixed
    assert fixed - used <= {n for n in fixed if any(start <= n for start in loops_over)} | _computed_from(computed)
    assert bool(computed) or not has_tail


def _computed_from(expressions: list[str]) -> set[int]:
    """Slots that `KEYS[3 + i]`, i from 1 to 3, means (check.lua)."""
    return {int(n) + i for text in expressions for n in re.findall(r"^(\d+) \+ i$", text) for i in (1, 2, 3)}


@pytest.mark.parametrize("name", BODIES)
def test_locals_of_keys_are_named_as_in_the_header(name: str) -> None:
    names = {number: text.split()[0] for number, tail, text in slots(name, "KEYS") if not tail}
    for left, right in re.findall(r"^local ([\w, ]+) = (KEYS\[\d+\].*)$", code_of(name), re.MULTILINE):
        for local, value in zip(left.split(", "), right.split(", "), strict=True):
            if match := re.fullmatch(r"KEYS\[(\d+)\]", value.strip()):
                assert local == names[int(match[1])]


@pytest.mark.parametrize("name", BODIES)
def test_keys_and_types_are_those_of_the_key_table(name: str) -> None:
    known = table()
    for _, _, text in slots(name, "KEYS"):
        for key in re.split(r" +(?:\(|[A-Z]{3,}|prefix)", text)[0].split(", "):
            role = ROLES.get(key) or key.partition("_")[0]
            assert role in known, f"{name}.lua: {key} is not in the table of buffer/keys.py"
            types = set(re.findall(r"\b(HASH|ZSET|LIST|STREAM|STRING|SET)\b", text))
            assert known[role] in types, f"{name}.lua: {key} is a {known[role]}"


@pytest.mark.parametrize("name", BODIES)
def test_header_lists_exactly_the_replies_of_the_body(name: str) -> None:
    code = code_of(name)
    sent = set(re.findall(r"\{'([A-Z_]+)'", code)) | set(re.findall(r"reply\[1\] = '([A-Z_]+)'", code))
    sent |= set(re.findall(r"table\.insert\(reply, 1, '([A-Z_]+)'\)", code))
    assert replies_of(name) == sent


def test_every_script_has_a_caller_and_every_call_a_script() -> None:
    called = set()
    for path in BUFFER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "call" and node.args:
                first = node.args[0]
                called |= {first.value} if isinstance(first, ast.Constant) else set()
    assert called == set(BODIES) == set(library())


@pytest.mark.parametrize("name", BODIES)
def test_every_refusal_is_known_to_its_caller(name: str) -> None:
    # what is left to a general case: an error that shows the reply, or "nothing was done"
    general = {"commit": {"GAP", "UNKNOWN_TASK"}, "deregister": {"UNKNOWN"}, "reap": {"GRACE"}, "reissue": {"CLOSED"}}
    general |= {"check": set(), "totals": set()}
    shared = {"control", "order_index"}
    sources = [p.read_text() for p in BUFFER.glob("*.py") if f'"{name}"' in p.read_text() or p.stem in shared]
    quoted = {code for source in sources for code in re.findall(r'"([A-Z_]+)"', source)}
    assert replies_of(name) - {"OK"} - general.get(name, set()) <= quoted


@pytest.mark.parametrize("name", [*BODIES, "prelude"])
def test_no_script_reads_payloads_or_walks_the_key_space(name: str) -> None:
    code = re.sub(r"--.*", "", PRELUDE) if name == "prelude" else code_of(name)
    commands = set(re.findall(r"redis\.call\('(\w+)'", code))
    assert not commands & {"GET", "MGET", "GETRANGE", "GETDEL", "KEYS", "SCAN", "HGETALL", "HVALS", "SMEMBERS", "HSCAN"}
    for _, _, text in [] if name == "prelude" else slots(name, "KEYS"):
        if text.split()[0] == "payload":
            on_payloads = set(re.findall(r"redis\.call\('(\w+)', KEYS\[(?:13 \+ )?i\]", code))
            assert on_payloads <= {"STRLEN", "EXISTS", "PERSIST"}


@pytest.mark.parametrize("name", BODIES)
def test_flags_let_scripts_that_free_memory_run_when_there_is_none(name: str) -> None:
    shebang = BODIES[name].partition("\n")[0]
    if name in {"claim", "create_run", "enqueue", "import", "reissue", "requeue"}:
        assert shebang == "#!lua"
    elif name in {"check", "totals"}:
        assert shebang == "#!lua flags=no-writes"
        assert not re.search(WRITES, code_of(name))
    else:
        assert shebang == "#!lua flags=allow-oom"


@pytest.mark.parametrize("name", BODIES)
def test_time_comes_from_the_server_and_nothing_is_random(name: str) -> None:
    assert not re.search(r"math\.random|os\.(time|clock)", code_of(name) + PRELUDE)


def test_arrange_refuses_names_that_are_not_in_the_header() -> None:
    script = library()["beat"]
    args: dict[str, Arg] = {"role": "trainer", "nonce": "n", "closing": 0}
    assert script.arrange({"control": "c"}, args) == (["c"], ["trainer", "n", 0])
    with pytest.raises(ScriptError, match=r"beat.*missing \['nonce'\]"):
        script.arrange({"control": "c"}, {"role": "trainer", "closing": 0})
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
