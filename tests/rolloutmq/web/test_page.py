"""What an operator sees and does in a browser: charts, groups, a rollout with its tokens, dead
letters.
"""

from __future__ import annotations

from pathlib import Path

from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.expected_conditions import presence_of_element_located
from selenium.webdriver.support.ui import WebDriverWait

from buffer.ids import group_id
from tests.rolloutmq.populate import Scene

PATIENCE_S = 400.0
PHONE, DESK = (390, 844), (1280, 900)


def until(chromium: Chrome, words: str, place: str = "main") -> str:
    """Wait for some words on the page; all of its text."""
    WebDriverWait(chromium, PATIENCE_S, ignored_exceptions=[StaleElementReferenceException]).until(
        lambda browser: words in browser.find_element(By.CSS_SELECTOR, place).text,
        f"no {words!r} in {place}",
    )
    return chromium.find_element(By.CSS_SELECTOR, place).text


def go(chromium: Chrome, address: str, view: str) -> None:
    """Open the page anew, and wait until `view` is drawn."""
    if chromium.current_url.startswith(address.partition("#")[0]):
        chromium.get("about:blank")  # another fragment of the same page opens nothing
    chromium.get(address)
    until(chromium, "every group is accounted for", "#account")
    turn(chromium, view)


def turn(chromium: Chrome, view: str) -> None:
    """Open another view of the page, and wait until it is drawn; a page takes longer to load."""
    chromium.execute_script(f"location.hash = '#/{view}'")
    drawn = (By.CSS_SELECTOR, f"main[data-shown='#/{view}'] *")
    WebDriverWait(chromium, PATIENCE_S).until(presence_of_element_located(drawn))


def test_the_run_at_one_glance(chromium: Chrome, address: str, scene: Scene, shots: Path) -> None:
    chromium.set_window_size(*DESK)
    go(chromium, address, "run")
    text = until(chromium, "Groups by stage")
    for place, groups in scene.run.account.totals().tasks[0].stages.items():
        assert f"{place} {groups} " in text.replace("\n", " ") + " "
    assert "trainer alive" in chromium.find_element(By.ID, "headline").text
    until(chromium, "Who waited for whom")
    lanes = chromium.find_elements(By.CSS_SELECTOR, ".lane")
    assert [lane.text for lane in lanes] == ["w0", "w1"]
    assert all(lane.find_elements(By.TAG_NAME, "rect") for lane in lanes)
    chromium.save_screenshot(str(shots / "run.png"))
    scene.run.store.client.hincrby(scene.run.keys.progress("math"), "enqueued", 1)
    until(chromium, "does not add up", "#account")


def test_groups_are_found_by_a_question_and_a_bad_one_is_told(
    chromium: Chrome, address: str, scene: Scene
) -> None:
    go(chromium, address, "groups")
    until(chromium, "math-0000000003")
    question = chromium.find_element(By.NAME, "where")
    question.send_keys('{"stage": "dead"}', Keys.ENTER)
    WebDriverWait(chromium, PATIENCE_S).until(
        lambda b: len(b.find_elements(By.CSS_SELECTOR, "tbody tr")) == 1
    )
    assert "math-0000000005" in until(chromium, "math-0000000005")
    chromium.find_element(By.NAME, "where").send_keys(" nonsense", Keys.ENTER)
    assert "not valid JSON" in until(chromium, "not valid JSON")
    # the form is still there, and takes the id of a group as well
    question = chromium.find_element(By.NAME, "where")
    question.clear()
    question.send_keys(" math-0000000003 ", Keys.ENTER)
    until(chromium, "What is 1 + 1?")


def test_a_group_offers_what_may_be_done_with_it(
    chromium: Chrome, address: str, scene: Scene
) -> None:
    gids = [group_id("math", draw) for draw in range(12)]
    places = scene.run.account.stages_of(gids)
    go(chromium, address, "groups")
    for stage, words, buttons in (
        ("waiting", "", ["Drop…"]),
        ("running", "", []),
        ("taken", "", []),
        ("pool", "", ["Requeue…", "Drop…"]),
        ("dead", "the judge said no", ["Requeue…", "Drop…"]),
        ("archived", "trained and committed; its payload is freed", []),
    ):
        gid = next(gid for gid, place in zip(gids, places, strict=True) if place == [stage])
        turn(chromium, f"groups/{gid}")
        until(chromium, words)
        shown = [button.text for button in chromium.find_elements(By.CSS_SELECTOR, "main button")]
        assert [text for text in shown if text in ("Requeue…", "Drop…")] == buttons, stage
