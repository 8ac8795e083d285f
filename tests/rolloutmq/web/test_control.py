from __future__ import annotations

import http.client
import time
from urllib.parse import urlsplit

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from buffer.control.control import SHORT_S, Mode, Work
from buffer.control.task_status import TaskStop
from buffer.redis.server.embedded import EmbeddedServer
from buffer.run.open import write_nonce
from buffer.run.settings import KeptSettings
from tests.rolloutmq.populate import Scene
from tests.rolloutmq.web.conftest import serving
from tests.rolloutmq.web.test_page import PATIENCE_S, go, turn, until


def press(chromium: Chrome, words: str, within: str = "main") -> None:
    path = f"//{within}//button[text()='{words}']"

    def is_pressed(browser: Chrome) -> bool:
        browser.find_element(By.XPATH, path).click()
        return True

    # what is shown may change between looking for a button and pressing it
    wait = WebDriverWait(chromium, PATIENCE_S, ignored_exceptions=[StaleElementReferenceException])
    wait.until(is_pressed, words)


def until_mode(chromium: Chrome, scene: Scene, mode: Mode) -> None:
    WebDriverWait(chromium, PATIENCE_S).until(lambda _: scene.run.control.state().mode is mode)


def test_a_pause_is_asked_for_and_says_who_holds_the_run(
    chromium: Chrome, address: str, scene: Scene
) -> None:
    go(chromium, address, "control")
    until(chromium, "The run is running")
    press(chromium, "Pause…")
    until(chromium, "Pause the run?", "dialog")
    press(chromium, "Cancel", "dialog")
    assert scene.run.control.state().mode is Mode.RUN
    press(chromium, "Pause…")
    chromium.find_element(By.CSS_SELECTOR, "dialog input[value=keep]").click()
    press(chromium, "Pause", "dialog")
    text = until(chromium, "Paused by an operator")
    assert "0 of 2 workers have confirmed; not yet: " in text
    assert scene.run.control.state().mode is Mode.KEEP
    until(chromium, "by the operator", "#headline")
    assert chromium.find_elements(By.XPATH, "//button[text()='Pause…']") == []
    press(chromium, "Resume")
    until_mode(chromium, scene, Mode.RUN)


def test_a_run_that_waits_for_a_stopped_task_leads_to_the_button_that_restarts_it(
    chromium: Chrome, address: str, scene: Scene
) -> None:
    run, work = scene.run, Work()
    run.control.open_producer(scene.producer, take_over=True)
    run.task_stops.publish(scene.producer, "math", TaskStop("broken", 0, "row 7 cannot be read"))
    work.wait_for(["math"])
    time.sleep(SHORT_S)
    run.control.renew_role("trainer", scene.trainer, work=work)
    go(chromium, address, "run")
    until(chromium, "waits until you restart task math", "#headline")
    chromium.find_element(By.CSS_SELECTOR, "#headline a").click()
    until(chromium, "The run waits until you restart task math")
    press(chromium, "Restart task math…")
    until(chromium, "row 7 cannot be read", "dialog")
    press(chromium, "Restart", "dialog")
    WebDriverWait(chromium, PATIENCE_S).until(lambda _: not run.task_stops.of("math").is_stopped)
    until(chromium, "The run is running")


def test_a_setting_is_changed_after_a_question_and_a_wrong_value_is_explained(
    chromium: Chrome, address: str, scene: Scene
) -> None:
    go(chromium, address, "control")
    until(chromium, "max_tries")
    for value, words in (("0", "greater than or equal to 1"), ("5", "max_tries")):
        field = chromium.find_element(By.CSS_SELECTOR, "[aria-label='value of max_tries']")
        field.clear()
        field.send_keys(value, Keys.ENTER)
        until(chromium, f"Set max_tries to {value}?", "dialog")
        press(chromium, "Set", "dialog")
        until(chromium, words, "body")
        # what the run does meanwhile does not replace the answer
        scene.run.control.set_mode("operator", Mode.KEEP if value == "0" else Mode.RUN)
        until(chromium, "by the operator" if value == "0" else "running", "#headline")
        assert words in chromium.find_element(By.TAG_NAME, "body").text
    WebDriverWait(chromium, PATIENCE_S).until(
        lambda b: b.find_elements(By.CSS_SELECTOR, "[data-key='max_tries=5']")
    )
    scene.run.refresh_limits()
    assert scene.run.limits.max_tries == 5


def test_dead_letters_are_grouped_by_cause_and_moved_together(
    chromium: Chrome, address: str, scene: Scene
) -> None:
    scene.enqueue(6)
    jobs = scene.claim("w0", 10)
    for number, job in enumerate(jobs[:4]):
        scene.run.jobs.release("w0", job, "failed", f"TimeoutError: no answer after {number}.5 s")
    go(chromium, address, "dead")
    until(chromium, "TimeoutError: no answer after … s")
    assert "4 groups of math, on w0" in until(chromium, "ValueError: the judge said no")
    press(chromium, "Requeue all 4…")
    until(chromium, "Requeue 4 groups?", "dialog")
    press(chromium, "Requeue", "dialog")
    WebDriverWait(chromium, PATIENCE_S).until(lambda _: len(scene.run.dead_letters) == 1)
    assert {scene.run.record(job.gid)["stage"] for job in jobs[:4]} == {"waiting"}
    press(chromium, "Drop…")
    press(chromium, "Drop", "dialog")
    until(chromium, "no dead letters")
    assert scene.run.record("math-0000000005") == {}


@pytest.mark.slow
def test_without_the_token_or_read_only_nothing_can_be_done(
    chromium: Chrome, address: str, scene: Scene, server: EmbeddedServer
) -> None:
    acting = "//main//button[.='Requeue…' or .='Drop…' or .='Pause…' or .='Set…']"
    go(chromium, address, "control")
    chromium.execute_script("sessionStorage.clear()")
    chromium.get("about:blank")
    page, _, token = address.partition("#token=")
    chromium.get(page)
    until(chromium, "this needs a token")
    assert "demo" not in chromium.find_element(By.TAG_NAME, "header").text
    assert chromium.find_elements(By.XPATH, acting) == []
    chromium.find_element(By.NAME, "token").send_keys(token, Keys.ENTER)
    until(chromium, "every group is accounted for", "#account")
    until(chromium, "Training")
    with serving(server.folder, "--read-only") as only_reads:
        go(chromium, only_reads, "run")
        for view, words in (
            ("control", "This page only reads"),
            ("dead", "the judge said no"),
            ("groups/math-0000000005", "the judge said no"),
        ):
            turn(chromium, view)
            until(chromium, words)
            assert chromium.find_elements(By.XPATH, acting) == [], view
        parts = urlsplit(only_reads)
        connection = http.client.HTTPConnection(parts.netloc, timeout=400)
        token = parts.fragment.removeprefix("token=")
        connection.request("POST", "/api/pause", headers={"Authorization": f"Bearer {token}"})
        assert connection.getresponse().status == 403
        connection.close()
    assert scene.run.control.state().mode is Mode.RUN


def test_a_setting_is_kept_in_the_folder_of_the_run_should_its_server_lose_everything(
    address: str, scene: Scene, server: EmbeddedServer
) -> None:
    write_nonce(server.folder, scene.run.nonce)
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=400)
    headers = {"Authorization": "Bearer secret"}
    connection.request("POST", "/api/settings?name=max_tries&value=7", headers=headers)
    assert connection.getresponse().status == 200
    connection.close()
    kept = KeptSettings(server.folder, scene.run.nonce).read()
    assert kept
    assert {name: each.value for name, each in kept.overrides.items()} == {"max_tries": 7}
