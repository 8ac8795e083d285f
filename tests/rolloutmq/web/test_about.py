"""What a run is: its config, and what people wrote about it."""

from __future__ import annotations

import http.client
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import orjson
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from buffer.redis.server.embedded import EmbeddedServer
from rolloutmq.views.run_note import read_note
from tests.rolloutmq.web.test_attacks import EVIL
from tests.rolloutmq.web.test_charts import log_steps
from tests.rolloutmq.web.test_control import press
from tests.rolloutmq.web.test_page import go, turn, until


def keep(folder: Path, rate: float) -> None:
    folder.mkdir(exist_ok=True)
    keys = [["learner.learning_rate", rate, "--set"], ["plan.steps", 5, "default"]]
    (folder / "config.json").write_bytes(orjson.dumps(keys))


def test_a_served_run_says_what_it_was_started_with(
    chromium: Chrome, address: str, server: EmbeddedServer
) -> None:
    keep(server.folder, 0.125)
    go(chromium, address, "about")
    text = until(chromium, "learner.learning_rate")
    assert "0.125" in text
    assert "plan.steps" not in text  # a default, until it is asked for
    chromium.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys("plan")
    until(chromium, "plan.steps")
    assert "numpy" in text  # versions


def test_compared_runs_show_the_keys_of_their_configs_that_differ(
    chromium: Chrome, address: str, server: EmbeddedServer
) -> None:
    other = server.folder.parent / "other"
    for folder, rate in ((server.folder, 0.125), (other, 0.25)):
        keep(folder, rate)
        log_steps(folder, [0.1])
    go(chromium, address, "run")
    chromium.find_element(By.XPATH, "//summary[text()='Compare runs']").click()
    chromium.find_element(By.XPATH, "//label[contains(., 'other')]/input").click()
    text = until(chromium, "learner.learning_rate")
    assert "0.125" in text
    assert "0.25" in text


def test_a_note_is_kept_with_the_run_and_is_never_read_as_html(
    chromium: Chrome, address: str, server: EmbeddedServer
) -> None:
    (server.folder / "note.json").unlink(missing_ok=True)
    go(chromium, address, "about")
    chromium.find_element(By.NAME, "text").send_keys(EVIL)
    tags = chromium.find_element(By.NAME, "tags")
    tags.send_keys("<svg/onload=window.owned=1>")
    press(chromium, "Save")
    until(chromium, "the note was not written", "body")
    tags.clear()
    tags.send_keys("baseline v2")
    press(chromium, "Save")
    go(chromium, address, "about")
    field = chromium.find_element(By.NAME, "text")
    assert field.get_attribute("value") == EVIL
    assert read_note(server.folder).tags == ("baseline", "v2")
    # whatever another program wrote there
    forged = {"text": EVIL, "tags": ["a"], "written_ms": 5}
    (server.folder / "note.json").write_bytes(orjson.dumps(forged))
    for view in ("run", "about"):
        turn(chromium, view)
        assert chromium.find_elements(By.CSS_SELECTOR, "main img, [onerror]") == []
        assert chromium.execute_script("return window.owned") is None


def test_a_note_is_bounded_and_no_writer_overwrites_what_he_has_not_read(
    address: str, server: EmbeddedServer
) -> None:
    (server.folder / "note.json").unlink(missing_ok=True)

    def write(**values: object) -> int:
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=400)
        headers = {"Authorization": "Bearer secret"}
        connection.request("POST", f"/api/note?{urlencode(values)}", headers=headers)
        status = connection.getresponse().status
        connection.close()
        return status

    assert write(text="first", tags="a " * 50) == 200
    first = read_note(server.folder)
    assert first.tags == ("a",)
    for values in (
        {"text": "x" * 4001}, {"tags": " ".join(map(str, range(17)))}, {"tags": "x" * 41},
        {"tags": "a\u202eb"}, {"text": "unread", "seen": ""}, {"text": "old", "seen": 7},
    ):  # fmt: skip
        assert write(**{"seen": first.written_ms} | values) == 400, values
    assert read_note(server.folder) == first
    assert write(text="second", seen=first.written_ms) == 200
    assert read_note(server.folder).text == "second"
