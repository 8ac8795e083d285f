"""Who may only write into Redis, or only has a page elsewhere, gets nothing out of a browser that
shows the run.
"""

from __future__ import annotations

import http.client
import itertools
import random
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlencode, urlsplit

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from starlette.routing import Route

from buffer.control.control import Mode
from rolloutmq.web.access import Access, token_of
from rolloutmq.web.app import make_app
from tests.rolloutmq.populate import Scene, forge
from tests.rolloutmq.web.test_page import PATIENCE_S, go, turn

EVIL = "<img src=x onerror=window.owned=1><script>window.owned=1</script><svg onload=window.owned=1>'\"javascript:owned"
ACTS = ("pause", "resume", "groups/math-0000000005/requeue", "groups/math-0000000005/drop")

SHOWN = "return document.querySelector('main').textContent"

ELSEWHERE = """<!doctype html><title>trying</title><iframe name="hole"></iframe>
<form method="post" action="{ours}/api/pause?mode=drain" target="hole" enctype="text/plain"><input name="a"></form>
<script>
const asked = [
  fetch("{ours}/api/pause?mode=drain", {{method: "POST", mode: "no-cors", credentials: "include"}}),
  fetch("{ours}/api/pause?mode=drain", {{method: "POST", headers: {{Authorization: "Bearer {token}"}}}}),
  fetch("{ours}/api/groups").then((answer) => answer.text()).then((text) => {{ window.stolen = text; }}),
  new Promise((resume) => {{ document.querySelector("iframe").onload = resume; document.forms[0].submit(); }}),
];
Promise.allSettled(asked).then((ends) => {{ document.title = "tried " + ends.map((end) => end.status).join(" "); }});
</script>"""
"""A page of another origin that acts and reads in the browser's name; it even knows the token."""


@pytest.fixture
def elsewhere(address: str) -> Iterator[str]:
    ours, _, token = address.partition("/#token=")
    page = ELSEWHERE.format(ours=ours, token=token).encode()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def test_no_text_of_a_worker_is_read_as_html_on_any_view(
    chromium: Chrome, address: str, scene: Scene
) -> None:
    (job,) = scene.claim("w0", 1)
    group = scene.run.buffer.read(job.payload)
    for state in group.states:
        state.messages, state.ground_truth = [{"role": EVIL, "content": EVIL}], EVIL
        state.response = EVIL
        state.error = EVIL
        state.extra = {EVIL: EVIL}
    scene.write_as("w0", job, group.states)
    forge(scene, EVIL)
    views = (
        "run", "groups", f"groups/{job.gid}", "groups/math-0000000003", "workers", "dead",
        "control", "events",
    )  # fmt: skip
    go(chromium, address, "run")
    for view in views:
        turn(chromium, view)
        if view not in ("run", "groups", "control"):  # these show numbers and names of groups alone
            WebDriverWait(chromium, PATIENCE_S).until(
                lambda browser: "onerror" in browser.execute_script(SHOWN), view
            )
        injected = chromium.find_elements(
            By.CSS_SELECTOR, "img, body script:not([src]), svg[onload], [onerror]"
        )
        assert injected == [], view
        assert chromium.execute_script("return window.owned") is None, view
        links = [
            link.get_attribute("href") or "" for link in chromium.find_elements(By.TAG_NAME, "a")
        ]
        assert all(link.startswith(address.partition("#")[0]) for link in links), view


def test_a_page_elsewhere_neither_acts_nor_reads(
    chromium: Chrome, elsewhere: str, scene: Scene
) -> None:
    chromium.get(elsewhere)
    WebDriverWait(chromium, PATIENCE_S).until(
        lambda browser: browser.title.startswith("tried"), "it never ended"
    )
    # a request without an answer that can be read is sent; one that must be asked for first, and an
    # answer, are not
    assert chromium.title == "tried fulfilled rejected rejected fulfilled"
    assert chromium.execute_script("return window.stolen") is None
    assert scene.run.control.state().mode is Mode.RUN


def test_no_route_answers_without_the_token(address: str, scene: Scene) -> None:
    """On loopback, where every user of the machine can connect."""
    app = make_app(scene.run, run_dir=None, access=Access("secret"), hosts=["127.0.0.1"])
    routes = [route for route in app.routes if isinstance(route, Route) and route.path != "/"]
    assert len(routes) > 10
    host = urlsplit(address).netloc
    for route in routes:
        path = re.sub(r"{\w+}", "math-0000000005", route.path)
        for method in (route.methods or set()) - {"HEAD"}:
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                connection = http.client.HTTPConnection(host, timeout=400)
                connection.request(method, path, headers=headers)
                assert connection.getresponse().status == 401, (method, path)
                connection.close()


PARAMETERS = (
    "where", "order", "page", "text", "outcome", "cause", "step", "why", "mode", "name", "value",
    "lines", "process", "level", "about", "since", "until", "runs", "run", "first", "last",
)  # fmt: skip
ODD = (
    "[" * 3000, '{"$or":[' * 900 + "1" + "]}" * 900, "9" * 5000, "-1", "1e400", "\0", "\u00b2",
    '{"tokens": 1e400}', "'" * 3000, "a" * 300,
)  # fmt: skip


def test_no_parameter_is_a_fault_of_a_route(address: str, scene: Scene) -> None:
    """Whatever a parser makes of it: deep, long, no number, or a number of 5,000 digits."""
    app = make_app(scene.run, run_dir=None, access=Access("secret"), hosts=["127.0.0.1"])
    host = urlsplit(address).netloc
    asked = [
        (method, re.sub(r"{\w+}", "math-0000000005", route.path), {"name": "x", "value": "1"})
        for route in app.routes
        if isinstance(route, Route) and route.path.startswith("/api/")
        for method in (route.methods or set()) - {"HEAD"}
    ]
    chosen = random.Random(0).sample([*itertools.product(asked, PARAMETERS, ODD)], 400)
    for (method, path, known), name, value in [
        *chosen,
        *((each, "value", value) for each in asked if "settings" in each[1] for value in ODD),
    ]:
        connection = http.client.HTTPConnection(host, timeout=400)
        query = urlencode(known | {name: value})
        connection.request(method, f"{path}?{query}", headers={"Authorization": "Bearer secret"})
        status = connection.getresponse().status
        connection.close()
        assert status < 500, (method, path, name, value[:40])


def test_the_token_is_kept_for_the_owner_of_the_folder(tmp_path: Path) -> None:
    token = token_of(tmp_path)
    file = tmp_path / "web.token"
    assert token_of(tmp_path) == token == file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    assert token_of(tmp_path) not in ("", token)  # others have seen the old one
    assert file.stat().st_mode & 0o777 == 0o600
    assert token_of(None) != token_of(None)


def test_routes_that_act_want_the_token_in_its_header_and_files_are_only_ours(
    address: str, scene: Scene
) -> None:
    parts = urlsplit(address)
    host = parts.netloc
    token = parts.fragment.removeprefix("token=")

    def ask(method: str, path: str, **headers: str) -> int:
        connection = http.client.HTTPConnection(host, timeout=400)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        assert b"def make_app" not in body
        assert b"root:" not in body
        return answer.status

    for act in ACTS:
        assert ask("GET", f"/api/{act}") in (400, 404, 405), act
        for path, headers in (
            (act, {}),
            (act, {"Authorization": "Bearer wrong"}),
            (act, {"Authorization": f"Basic {token}"}),
            (act, {"Cookie": f"token={token}"}),
            (f"{act}?token={token}", {"Content-Type": "application/x-www-form-urlencoded"}),
        ):
            assert ask("POST", f"/api/{path}", **headers) == 401, (act, headers)
        assert (
            ask("POST", f"/api/{act}", Host="evil.example", Authorization=f"Bearer {token}") == 400
        ), act
    assert scene.run.control.state().mode is Mode.RUN
    assert scene.run.record("math-0000000005")["stage"] == "dead"
    for name in (
        "../app.py",
        "%2e%2e/app.py",
        "..%2fapp.py",
        "%2e%2e%2fapp.py",
        "//etc/passwd",
        "..\\app.py",
        "%00",
    ):
        assert ask("GET", f"/static/{name}") in (400, 404), name
    assert ask("GET", "/static/frame/frame.js") == 200
    assert ask("GET", "/", Host="evil.example") == 400
    assert ask("POST", "/api/pause", Authorization=f"Bearer {token}") == 200
    assert scene.run.control.state().mode is Mode.ABORT
