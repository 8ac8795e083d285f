from __future__ import annotations

import asyncio
import io
import logging
import resource
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.errors import ConfigError
from buffer.wire.rollout import Status
from buffer.wire.sampling import SampleParams
from producer_workers.agent_loops.chat_delta import ChatDelta
from rolloutmq.config.load import load_config
from rolloutmq.extensions.gateway import guests, server
from rolloutmq.extensions.gateway.agent_sessions import AgentSessions
from rolloutmq.extensions.gateway.agents import AgentTask
from rolloutmq.extensions.gateway.section import GatewaySection
from rolloutmq.extensions.gateway.server import Gateway
from rolloutmq.extensions.gateway.session import Session
from tests.cluster import adjacent_ports
from tests.producer_workers.recorder import Recorder, loop_of, questions, run
from tests.thoroughness import examples
from tests.tls import Authority

USER: list[Any] = [{"role": "user", "content": "x"}]
CHAT = {"messages": USER}
GENEROUS_S = 400.0


def session_of(chat: Any, engine: Any) -> AgentSessions:
    ends = [chat.eos_token_id]
    params = SampleParams(max_tokens=100_000)
    made = Session("g/0", engine, chat, ChatDelta(chat, ends), ends, params, None)
    return AgentSessions(lambda *_: made)


@asynccontextmanager
async def serving(**section: Any) -> AsyncIterator[Gateway]:
    gateway = Gateway(GatewaySection(**section))
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.close()


def play(scene: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(GENEROUS_S):
            await scene

    asyncio.run(limited())


def root(gateway: Gateway) -> str:
    return gateway.url.removesuffix("/v1")


def address(gateway: Gateway) -> tuple[str, int]:
    host, port = root(gateway).split("//")[1].split(":")
    return host, int(port)


async def post(url: str, key: str, body: Any = CHAT, **more: Any) -> tuple[int, Any, Any]:
    headers = {"Authorization": f"Bearer {key}", **more.pop("headers", {})}
    sent = {"json": body} if isinstance(body, dict) else {"data": body}
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, headers=headers, **sent, **more) as reply,
    ):
        return reply.status, await reply.json(), reply.headers


# -- who is answered ---------------------------------------------------------


def test_a_key_reaches_its_own_session_and_ends_with_it(
    chat: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    first, second = Recorder(chat, ["one", "lost"]), Recorder(chat, ["two"])

    async def scene() -> None:
        async with serving() as gateway:
            url = f"{gateway.url}/responses"
            mine = gateway.admit(session_of(chat, first))
            other = gateway.admit(session_of(chat, second))
            status, said, _ = await post(url, mine, {"input": "x"})
            assert (status, "one" in str(said)) == (200, True)
            continued = {"input": "and?", "previous_response_id": said["id"]}
            assert (await post(url, other, continued))[0] == 400
            assert second.requests == [], "the conversation of another session"
            assert "two" in str((await post(url, other, {"input": "x"}))[1])
            chat.decode = lambda *_, **__: 1 / 0  # a fault of the worker, which is logged
            in_path = f"{root(gateway)}/ng-rollout/{mine}/v1/chat/completions"
            assert (await post(in_path, ""))[0] == 500
            del chat.decode
            assert "ZeroDivisionError" in caplog.text
            gateway.dismiss(mine)
            ended = await post(url, mine, continued)
            assert ended[:2] == (await post(url, "rmq-guessed", continued))[:2]
            assert ended[0] == 401
            assert (len(first.said), len(second.said)) == (2, 1)
            logged = [str(vars(record)) for record in caplog.records]
            assert not [each for each in logged if mine in each or other in each]

    play(scene())


Request = tuple[str, str, dict[str, str], bytes]
WORDS = st.text("abc/.%?=&{}é", max_size=12)
PATHS = st.sampled_from(["v1/models", "v1/chat/completions", "v1/messages", "sessions", ""])
HEADERS = st.dictionaries(
    st.sampled_from(["Authorization", "x-api-key", "Content-Type", "Expect", "X-A"]),
    st.sampled_from(["", "Bearer", "Bearer rmq-", "Basic eA==", "rmq-é", "100-continue", "a" * 300])
    | WORDS,
    max_size=3,
)
METHODS = st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT", "TRACE"])
REQUESTS = st.tuples(METHODS, PATHS | WORDS, HEADERS, st.binary(max_size=40))


def raw(request: Request) -> bytes:
    method, path, headers, body = request
    lines = [f"{method} /{path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


@given(st.lists(REQUESTS, min_size=1, max_size=5))
@settings(max_examples=examples(60))
def test_nobody_without_a_key_is_told_anything(requests: list[Request]) -> None:
    class Closed(Session):
        def __init__(self) -> None:
            self.interrupted = asyncio.Event()

        async def ask(self, ask: Any) -> Any:
            raise AssertionError("asked without a key")

        count = ask

    async def scene() -> None:
        async with serving() as gateway:
            key = gateway.admit(AgentSessions(lambda *_: Closed()))
            for request in requests:
                reader, writer = await asyncio.open_connection(*address(gateway))
                writer.write(raw(request))
                said = (await reader.read()).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
                writer.close()
                assert said.split(b" ")[1] in (b"400", b"401", b"417"), said
                assert not any(
                    word in said for word in (key.encode(), b"completions", b"Traceback")
                )

    play(scene())


# -- limits ------------------------------------------------------------------


@pytest.mark.parametrize("has_key", [False, True])
@pytest.mark.parametrize("form", ["whole", "chunks", "packed"])
def test_a_body_of_150_mb_is_refused_while_others_are_answered(
    chat: Any, has_key: bool, form: str
) -> None:
    engine = Recorder(chat, ["one"])
    body = b" " * 150_000_000

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1_000_000):
            yield body[start : start + 1_000_000]

    async def flood(url: str, key: str) -> int:
        data = {"whole": io.BytesIO(body), "packed": zlib.compress(body)}.get(form) or pieces()
        more = {"headers": {"Content-Encoding": "deflate"}} if form == "packed" else {}
        return (await post(url, key, data, **more))[0]

    async def scene() -> None:
        async with serving() as gateway:
            url = f"{gateway.url}/chat/completions"
            key = gateway.admit(session_of(chat, engine))
            flooding = asyncio.create_task(flood(url, key if has_key else "rmq-guessed"))
            assert (await post(url, gateway.admit(session_of(chat, engine))))[0] == 200
            assert await flooding == (413 if has_key else 401)

    play(scene())
    assert len(engine.said) == 1


HALVES = {
    "nothing": b"",
    "a line": b"POST /v1/chat/completions HTTP/1.1\r\n",
    "headers": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n",
    "a body": (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        b'Content-Length: 100\r\n\r\n{"mess'
    ),
}


@pytest.mark.parametrize("half", [*HALVES])
@pytest.mark.parametrize("has_key", [False, True])
def test_a_connection_that_stays_half_open_is_closed(
    chat: Any, half: str, has_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "QUIET_S", 0.3)

    async def scene() -> None:
        async with serving() as gateway:
            key = gateway.admit(session_of(chat, Recorder(chat)))
            sent = HALVES[half].replace(b"{key}", key.encode() if has_key else b"rmq-guessed")
            reader, writer = await asyncio.open_connection(*address(gateway))
            writer.write(sent)
            # of a body that may still come, aiohttp reads on for 10 s
            said = await (reader.readline() if half == "a body" else reader.read())
            writer.close()
            if half == "a body":
                assert said.split(b" ")[1] == (b"408" if has_key else b"401")
            else:
                assert said == b""

    play(scene())


def test_many_connections_of_strangers_leave_room_for_agents(chat: Any) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))

    async def scene() -> None:
        async with serving() as gateway:
            idle = [await asyncio.open_connection(*address(gateway)) for _ in range(300)]
            key = gateway.admit(session_of(chat, Recorder(chat)))
            assert (await post(f"{gateway.url}/chat/completions", key))[0] == 200
            program = await asyncio.create_subprocess_exec("true")
            assert await program.wait() == 0
            for _, writer in idle:
                writer.close()

    try:
        play(scene())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_too_many_requests_are_put_off_and_clients_ask_again(
    chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import anthropic  # here: it takes seconds, which each process of the tests would spend

    monkeypatch.setattr(guests, "MOST_AT_ONCE", 2)
    engine = Recorder(chat)

    async def scene() -> None:
        async with serving() as gateway:
            key = gateway.admit(session_of(chat, engine))
            async with openai.AsyncOpenAI(
                base_url=gateway.url, api_key=key, max_retries=20
            ) as patient:
                create: Any = patient.chat.completions.create
                said = await asyncio.gather(
                    *(create(model="any", messages=USER, max_tokens=9) for _ in range(6))
                )
            assert len(engine.said) == 6
            assert len({each.id for each in said}) == 6, "each has an answer of its own"
            monkeypatch.setattr(guests, "MOST_AT_ONCE", 0)
            async with anthropic.AsyncAnthropic(
                base_url=root(gateway), api_key=key, max_retries=0
            ) as other:
                with pytest.raises(anthropic.RateLimitError) as refused:
                    await other.messages.create(model="any", messages=USER, max_tokens=5)
            assert refused.value.response.headers["Retry-After"] == "1"
            monkeypatch.setattr(guests, "MOST_AT_ONCE", 10)
            monkeypatch.setattr(guests, "MOST_BYTES", 1000)
            sizes = {}
            for size in (10, 1000):
                body = {"messages": [{"role": "user", "content": "x" * size}], "max_tokens": 5}
                sizes[size] = (await post(f"{gateway.url}/chat/completions", key, body))[0]
            assert sizes == {10: 200, 1000: 429}
            monkeypatch.setattr(guests, "MOST_PER_S", 1)
            answers: list[Any] = []
            while 429 not in [status for status, *_ in answers]:
                together = (post(f"{gateway.url}/models", key) for _ in range(8))
                answers = await asyncio.gather(*together)
            assert (await post(f"{gateway.url}/models", "rmq-guessed"))[0] == 401

    play(scene())


# -- the address -------------------------------------------------------------


async def said_to_openai(url: str, key: str, **client: Any) -> str:
    async with openai.AsyncOpenAI(base_url=url, api_key=key, **client) as asking:
        said: Any = await asking.chat.completions.create(model="any", messages=USER)
    return str(said.choices[0].message.content)


def test_clients_of_both_vendors_ask_over_tls(
    chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import anthropic

    authority = Authority(tmp_path / "tls")
    authority.issue("server")
    files = {
        "tls_cert": authority.folder / "server.crt",
        "tls_key": authority.folder / "server.key",
    }
    engine = Recorder(chat, ["one", "two"])

    async def scene() -> None:
        async with serving(**files) as gateway:
            assert gateway.url.startswith("https://127.0.0.1:")
            key = gateway.admit(session_of(chat, engine))
            with pytest.raises(openai.APIConnectionError):
                await said_to_openai(gateway.url, key, max_retries=0)
            plain = gateway.url.replace("https:", "http:")
            with pytest.raises(aiohttp.ClientError):
                await post(f"{plain}/chat/completions", key)
            monkeypatch.setenv("SSL_CERT_FILE", str(authority.folder / "ca.crt"))
            assert "one" in await said_to_openai(gateway.url, key)
            async with (
                anthropic.AsyncAnthropic(base_url=root(gateway), api_key=key) as client,
                client.messages.stream(model="any", messages=USER, max_tokens=9) as stream,
            ):
                assert "two" in await stream.get_final_text()

    play(scene())


def test_a_key_with_a_password_or_without_its_certificate_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    authority.issue("server")
    authority.issue("other")
    authority._openssl(
        "pkey", "-in", "server.key", "-aes256", "-passout", "pass:x", "-out", "locked.key"
    )
    for name in ("other.key", "locked.key", "missing.key"):
        section = GatewaySection(
            tls_cert=authority.folder / "server.crt", tls_key=authority.folder / name
        )
        with pytest.raises(ConfigError, match="tls"):
            section.tls_context()
    own = GatewaySection(
        tls_cert=authority.folder / "server.crt", tls_key=authority.folder / "server.key"
    )
    assert isinstance(own.tls_context(), ssl.SSLContext)


def test_an_agent_gets_the_public_url_and_its_proxy_carries_it(
    chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a sandbox elsewhere, which reaches the name of the worker through a proxy only."""
    for name in ("no_proxy", "NO_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "")
    carried: list[bytes] = []
    urls: list[str] = []
    gateway = Gateway(GatewaySection(public_url="http://{hostname}.sandbox.test:{port}/"))

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = int(urls[0].split(":")[2].split("/")[0])
        there, back = await asyncio.open_connection("127.0.0.1", port)
        carried.append(await reader.read(100_000))
        back.write(carried[-1].replace(b"Host:", b"Connection: close\r\nHost:", 1))
        writer.write(await there.read())
        for each in (writer, back):
            each.close()

    async def solve(task: AgentTask) -> float:
        urls.append(task.base_url)
        async with await asyncio.start_server(carry, "127.0.0.1", 0) as proxy:
            port = proxy.sockets[0].getsockname()[1]
            monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
            await said_to_openai(task.base_url, task.api_key)
        return 1.0

    (state,) = run(loop_of(chat, solve, gateway=gateway), Recorder(chat), questions("x"))
    assert (state.status, len(carried)) == (Status.COMPLETED, 1)
    assert urls[0].startswith(f"http://{socket.gethostname()}.sandbox.test:")
    assert carried[0].startswith(f"POST {urls[0]}/chat/completions ".encode())


def test_workers_of_one_machine_share_a_range_of_ports() -> None:
    first = adjacent_ports()

    async def scene() -> None:
        async with serving(port=first, ports=2) as one:
            async with serving(port=first, ports=2) as two:
                await one.start()  # again
                assert [address(each)[1] for each in (one, two)] == [first, first + 1]
                with pytest.raises(ConfigError, match=str(first + 1)):
                    await Gateway(GatewaySection(port=first, ports=2)).start()
            async with serving(port=first, ports=2) as three:
                assert address(three)[1] == first + 1
        with pytest.raises(ConfigError):
            await Gateway(GatewaySection(host="not..a.host", port=first, ports=2)).start()
        with pytest.raises(ConfigError):
            await Gateway(GatewaySection(host="192.0.2.1")).start()

    play(scene())


CONFIG = """
[run]
name = "demo"
[launch]
workers = 2
[tasks.web]
agent_loop = "gateway"
agent_loop_options = { command = ["agent"] }
dataset = { kind = "jsonl", path = "x.jsonl" }
[gateway]
"""


@pytest.mark.parametrize(
    ("lines", "at_fault"),
    [
        ('tls_cert = "a.pem"', "tls_key"),
        ('host = "0.0.0.0"', "public_url"),
        ('host = ""', "host"),
        ('public_url = "worker:8300"', "public_url"),
        ('public_url = "http://a?b"', "public_url"),
        ('public_url = "http://a"', "{port}"),
        ('public_url = "http://a"\nport = 8300\nports = 2', "{port}"),
        ('public_url = "http://{host}:{port}"', "{hostname}"),
        ('public_url = "http://a:{port}"\ntls_cert = "a.pem"\ntls_key = "b.pem"', "https"),
        ("port = 8300", "ports"),
        ("port = 65535\nports = 2", "65535"),
        ("port = -1", "port"),
        ("ports = 0", "ports"),
    ],
)
def test_a_wrong_address_is_reported_with_its_key(
    tmp_path: Path, lines: str, at_fault: str
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG + lines, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "run.toml")
    assert at_fault in str(refused.value)


@pytest.mark.parametrize(
    ("section", "is_warned"),
    [
        ({}, False),
        ({"host": "::1"}, False),
        ({"host": "10.0.0.1"}, True),
        ({"host": "0.0.0.0", "public_url": "http://a:{port}"}, True),
        ({"host": "0.0.0.0", "public_url": "https://a:{port}"}, False),
        ({"host": "10.0.0.1", "tls_cert": Path("a"), "tls_key": Path("b")}, False),
    ],
)
def test_an_address_that_others_can_read_along_is_warned_about(
    section: dict[str, Any], is_warned: bool
) -> None:
    assert bool([*GatewaySection(**section).warnings()]) == is_warned
