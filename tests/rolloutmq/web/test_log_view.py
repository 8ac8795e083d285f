from __future__ import annotations

import http.client
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from buffer.redis.server.embedded import EmbeddedServer
from tests.rolloutmq.commands.look.test_logs import append, line
from tests.rolloutmq.web.test_attacks import EVIL
from tests.rolloutmq.web.test_page import DESK, PATIENCE_S, PHONE, go, turn, until

GID = "math-0000000003"


@pytest.fixture
def logs(server: EmbeddedServer) -> Path:
    folder = server.folder / "logs"
    folder.mkdir(exist_ok=True)
    for name in ("trainer", "worker-0", "worker-1"):
        (folder / f"{name}.log").unlink(missing_ok=True)
    append(folder, "trainer", line(1, "loads the model") + line(9, "step", step=1, reward=0.5))
    failed = line(2, "group failed", level="warning", gid=GID, exception=f"Traceback\n{EVIL}")
    append(folder, "worker-0", failed + line(3, EVIL, level="error", **{EVIL: EVIL}))
    append(folder, "worker-1", f"\x1b[2J{EVIL}\n" + line(4, f"judged {GID} \u202e"))
    return folder


def test_lines_are_filtered_followed_and_of_one_group(
    chromium: Chrome, address: str, logs: Path, shots: Path
) -> None:
    chromium.set_window_size(*DESK)
    go(chromium, address, "logs")
    processes = chromium.find_elements(By.CSS_SELECTOR, "[role=log] > .line b")
    assert [process.text for process in processes] == [
        *("worker-1", "trainer", "worker-0", "worker-0", "worker-1", "trainer")
    ]
    append(logs, "trainer", line(10, "a new line"))
    until(chromium, "a new line")
    assert chromium.execute_script("return window.owned") is None
    assert chromium.find_elements(By.CSS_SELECTOR, "main img, main script, main svg") == []

    Select(chromium.find_element(By.NAME, "level")).select_by_value("error")
    count = "return document.querySelectorAll('[role=log] > .line').length"
    WebDriverWait(chromium, PATIENCE_S).until(lambda browser: browser.execute_script(count) == 1)
    turn(chromium, "logs?process=worker-0")
    chromium.find_element(By.CSS_SELECTOR, "[role=log] button").click()
    beside = until(chromium, f"About {GID}", "aside")
    assert r"\u202e" in beside
    assert "judged" in beside and "group failed" in beside and "loads" not in beside  # noqa: PT018
    chromium.save_screenshot(str(shots / "logs.png"))
    chromium.set_window_size(*PHONE)
    root = "document.documentElement"
    assert chromium.execute_script(f"return {root}.scrollWidth <= {root}.clientWidth")
    chromium.save_screenshot(str(shots / "logs_phone.png"))


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("lines=0", 400), ("lines=x", 400), (f"lines={'1' * 5000}", 400), ("level=loud", 400),
        (f"about={'1' * 5000}", 200),
    ],
)  # fmt: skip
def test_a_wrong_filter_is_refused(address: str, logs: Path, query: str, status: int) -> None:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=400)
    connection.request("GET", f"/api/logs?{query}", headers={"Authorization": "Bearer secret"})
    assert connection.getresponse().status == status
    connection.close()


def test_huge_lines_are_sent_without_their_middle(address: str, logs: Path) -> None:
    huge = "\x1b" * 20_000
    fields = {f"{number}{huge}": huge for number in range(30)}
    append(logs, "trainer", line(20, huge, exception=f"{huge}ValueError: no", **fields))
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=400)
    connection.request("GET", "/api/logs?lines=1", headers={"Authorization": "Bearer secret"})
    event = connection.getresponse().readline()
    connection.close()
    assert len(event) < 30_000
    assert orjson.loads(event.removeprefix(b"data: "))["lines"][0]["exception"].endswith("no")
