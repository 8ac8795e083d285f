"""What is shown once, together, or first."""

from __future__ import annotations

import orjson
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from buffer.control.control import Mode
from buffer.redis.server.embedded import EmbeddedServer
from buffer.run.settings import parse_change
from rolloutmq.process_ends import ProcessJournal
from tests.rolloutmq.populate import Scene
from tests.rolloutmq.web.test_attacks import EVIL
from tests.rolloutmq.web.test_control import press
from tests.rolloutmq.web.test_page import PATIENCE_S, go, turn, until

CAUSE = "TimeoutError: the judge gave no answer"


def test_one_cause_is_shown_once_and_leads_to_what_shows_it(
    chromium: Chrome, address: str, scene: Scene
) -> None:
    """A task that fails in each try has dead letters, a trouble and findings of one cause."""
    scene.enqueue(6)
    for job in scene.claim("w0", 10)[:4]:
        scene.run.jobs.release("w0", job, "failed", CAUSE)
    go(chromium, address, "run")
    until(chromium, "Groups by stage")
    WebDriverWait(chromium, PATIENCE_S).until(
        lambda b: (
            CAUSE in str(b.execute_script("return document.querySelector('main').textContent"))
        )
    )
    rows = chromium.execute_script(
        "return [...document.querySelectorAll('main li, main .panel p')]"
        ".filter((row) => row.textContent.includes(arguments[0])).length",
        CAUSE,
    )
    assert rows == 1


def test_restarts_and_the_last_exit_of_each_process_are_shown(
    chromium: Chrome, address: str, server: EmbeddedServer
) -> None:
    journal = ProcessJournal(server.folder)
    for _ in range(3):
        journal.started("trainer", 0, 1)
    end = journal.end_of("trainer", 0, 1, 1).model_copy(update={"cause": f"Error: {EVIL}"})
    journal.ended(end)
    journal.started("w0", 0, 2)
    go(chromium, address, "run")
    panel = "section.panel.processes"
    text = until(chromium, "ended with exit code 1", panel)
    assert EVIL in text
    rows = chromium.find_elements(By.CSS_SELECTOR, f"{panel} tbody tr")
    counts = [row.find_elements(By.TAG_NAME, "td")[2].text for row in rows]
    assert counts == ["2", "0"]


def test_control_changes_are_one_row_among_all_events(
    chromium: Chrome, address: str, scene: Scene
) -> None:
    for _ in range(5):
        scene.run.control.set_mode("operator", Mode.KEEP)
        scene.run.control.set_mode("operator", Mode.RUN)
    go(chromium, address, "events")
    until(chromium, "control \u00d7 10")
    (row,) = chromium.find_elements(By.XPATH, "//tr[contains(., 'control')]")
    row.find_element(By.TAG_NAME, "summary").click()
    assert row.text.count("by operator") == 10
    chromium.find_element(By.CSS_SELECTOR, "select option[value=control]").click()
    WebDriverWait(chromium, PATIENCE_S).until(
        lambda b: len(b.find_elements(By.CSS_SELECTOR, "main tbody tr")) == 10
    )


def test_a_changed_setting_comes_first_and_goes_back_to_the_config(
    chromium: Chrome, address: str, scene: Scene
) -> None:
    wanted, _ = parse_change(["pause_timeout_s=77"])
    scene.run.set(wanted, by="somebody")
    go(chromium, address, "control")
    until(chromium, "by somebody")
    first = chromium.find_element(By.CSS_SELECTOR, ".setting .name")
    assert first.text == "pause_timeout_s"
    press(chromium, "As in the config…")
    press(chromium, "Set", "dialog")
    WebDriverWait(chromium, PATIENCE_S).until(lambda _: not has_changes(scene))
    assert scene.run.limits.pause_timeout_s == 300


def has_changes(scene: Scene) -> bool:
    scene.run.refresh_limits()
    return bool(scene.run.settings.overrides)


def test_curves_of_other_magnitudes_have_axes_of_their_own(
    chromium: Chrome, address: str, server: EmbeddedServer
) -> None:
    metrics = {"policy/kl_old": 0.0001, "policy/kl_ref": 0.5, "mismatch/kl": 0.0002}
    line = {"step": 1, "lineage": "l", "gids": [], "ended_s": 1.8e9, "metrics": metrics}
    (server.folder / "steps.jsonl").write_bytes(orjson.dumps(line) + b"\n")
    go(chromium, address, "run")
    turn(chromium, "run?chart=policy/kl_old")  # where a finding says to look
    WebDriverWait(chromium, PATIENCE_S).until(
        lambda b: b.execute_script("return document.activeElement.closest('[data-chart=kl-2]')")
    )
    entries = "[...document.querySelectorAll('[data-chart=%s] .entry')].map((e) => e.dataset.key)"
    large, small = (chromium.execute_script(f"return {entries % key}") for key in ("kl", "kl-2"))
    assert large == ["to the reference"]
    assert small == ["to the old policy", "trainer to engine"]
