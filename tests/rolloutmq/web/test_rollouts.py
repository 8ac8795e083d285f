"""What somebody reads on the rollouts page: the queue by a form, a step that is long gone, and texts
of which each tries something else.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs

import orjson
import pytest
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from buffer.redis.server.embedded import EmbeddedServer
from tests.rolloutmq.populate import Scene, write_samples
from tests.rolloutmq.web.test_page import DESK, PATIENCE_S, go, turn, until

GID = "math-0000000001"


@pytest.fixture
def folder(server: EmbeddedServer) -> Iterator[Path]:
    """The run's folder, which has no sample log afterwards."""
    yield server.folder
    shutil.rmtree(server.folder / "samples", ignore_errors=True)
    (server.folder / "steps.jsonl").unlink(missing_ok=True)


def address_of(chromium: Chrome) -> tuple[str, dict[str, str]]:
    path, _, query = chromium.execute_script("return location.hash").partition("?")
    return path, {name: values[0] for name, values in parse_qs(query).items()}


def count(chromium: Chrome, rows: int) -> list[WebElement]:
    found = (By.CSS_SELECTOR, "main tbody tr")
    WebDriverWait(chromium, PATIENCE_S).until(lambda b: len(b.find_elements(*found)) == rows)
    return chromium.find_elements(*found)


def press(chromium: Chrome, *keys: str) -> None:
    for key in keys:
        ActionChains(chromium).send_keys(key).perform()


@pytest.mark.slow
def test_a_form_builds_the_query_that_it_shows(
    chromium: Chrome, address: str, scene: Scene
) -> None:
    chromium.set_window_size(*DESK)
    go(chromium, address, "groups")
    count(chromium, 9)
    Select(chromium.find_element(By.NAME, "stage")).select_by_value("pool")
    count(chromium, 2)
    least = chromium.find_element(By.NAME, "reward from")
    least.send_keys("0.25", Keys.ENTER)
    count(chromium, 1)
    _, asked = address_of(chromium)
    assert orjson.loads(asked["where"]) == {"stage": "pool", "reward": {"$gte": 0.25}}
    assert chromium.find_element(By.NAME, "where").get_attribute("value") == asked["where"]
    # the address alone shows the same again
    chromium.refresh()
    count(chromium, 1)
    assert chromium.find_element(By.NAME, "reward from").get_attribute("value") == "0.25"
    # what no form can build stays as it is written
    written = chromium.find_element(By.NAME, "where")
    written.clear()
    written.send_keys('{"$or": [{"stage": "dead"}, {"stage": "taken"}]}', Keys.ENTER)
    count(chromium, 2)
    assert not chromium.find_element(By.NAME, "stage").is_enabled()
    chromium.find_element(By.XPATH, "//button[text()='Clear']").click()
    count(chromium, 9)
    chromium.find_element(By.LINK_TEXT, "tokens").click()
    until(chromium, "tokens ↓")
    words = chromium.find_element(By.NAME, "text")
    words.send_keys("IT IS", Keys.ENTER)  # it was said in 3 groups that are still there
    assert "It is ⟨U+001B⟩[31mred" in until(chromium, "[31mred")
    count(chromium, 3)
    chromium.find_element(By.NAME, "text").send_keys(Keys.CONTROL, "a")
    chromium.find_element(By.NAME, "text").send_keys(" math-0000000003 ", Keys.ENTER)
    until(chromium, "What is 1 + 1?")


@pytest.mark.slow
def test_a_freed_step_is_read_with_keys_alone(
    chromium: Chrome, address: str, scene: Scene, folder: Path, shots: Path
) -> None:
    chromium.set_window_size(*DESK)
    go(chromium, address, f"groups/{GID}")
    until(chromium, "trained and committed; its payload is freed")
    write_samples(scene, folder)
    turn(chromium, "groups?step=newest")
    count(chromium, 2)
    until(chromium, "of 1 to 1")
    press(chromium, "j", "j", "k", "j", Keys.ENTER)
    until(chromium, "It was worst.")
    assert address_of(chromium) == (f"#/groups/{GID}", {"step": "1"})
    assert "step 1, worst, from the sample log" in until(chromium, "from the sample log")
    assert "the same text as #1" not in until(chromium, "advantage")
    press(chromium, "j", "j", "d")
    until(chromium, "the same text as #1")
    assert address_of(chromium)[1] == {"step": "1", "view": "changes", "base": "1"}
    press(chromium, "v")
    assert address_of(chromium)[1]["view"] == "rendered"
    chromium.save_screenshot(str(shots / "sample.png"))
    press(chromium, "?")
    assert "differences" in until(chromium, "next, previous", "dialog[open]")
    press(chromium, Keys.ESCAPE, "u")
    until(chromium, "of 1 to 1")
    press(chromium, "/")
    press(chromium, *"was best", Keys.ENTER)
    (row,) = count(chromium, 1)
    assert "It was best." in row.text
    # the address of the group alone finds it, too, as long as it is in the log
    turn(chromium, f"groups/{GID}")
    until(chromium, "It was worst.")


HOSTILE = [
    "<img src=x onerror=window.owned=1><script>window.owned=1</script>",
    "[a](javascript:window.owned=1) ![b](https://evil.example/x.png) <https://evil.example>",
    "$$\\text{</math><img src=x onerror=window.owned=1>}$$ \\(\\href{javascript:window.owned=1}{x}\\)",
    "$\\def\\a{\\a\\a}\\a$ $\\rule{9999em}{9999em}$ $\\class{selected}{x} \\style{color:red}{y}$",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src onerror=window.owned=1&gt;'>",
    "<think>never closed <script>window.owned=1</script>",
    '<tool_call>{"name": "</summary><img src=x onerror=window.owned=1>"}</tool_call>',
    "\x1b[2J\x1b]8;;http://evil.example\x07red\x1b[0m \u202eleft to right\u202c \u2067\u200b\ufeff\uffff\x00",
    "```html\n<iframe srcdoc='<script>parent.owned=1</script>'></iframe>\n```",
    "- " * 300 + ">" * 3000 + "*" * 3000 + "[" * 3000 + "$" * 3000,
    "\u0915\u094d\u0937\u0947" + "\u0300" * 2000 + " שלום " + "w" * 5000,
]
LIVING = "return document.querySelectorAll(\"main :is(img, script, iframe, style, svg, [onerror], [src], [style], a:not([href^='#']))\").length"


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["\n\n".join(HOSTILE), "<b>huge</b> " * 200_000], ids=["odd", "huge"]
)
def test_hostile_texts_are_inert_in_every_view(
    chromium: Chrome, address: str, scene: Scene, folder: Path, text: str
) -> None:
    write_samples(scene, folder, text)
    chromium.set_window_size(*DESK)
    go(chromium, address, "groups?step=1")
    for view in ("rendered", "text", "changes"):
        turn(chromium, f"groups/{GID}?step=1&view={view}")
        shown = until(chromium, "advantage")
        assert chromium.execute_script(LIVING) == 0, view
        assert chromium.execute_script("return window.owned") is None, view
        assert not set("\x1b\x00\u202e\u2067") & set(shown), view
        wide, room = chromium.execute_script(
            "return [document.documentElement.scrollWidth, innerWidth]"
        )
        assert wide <= room, view
        # the page still answers
        press(chromium, "j")
        assert chromium.find_elements(By.CSS_SELECTOR, ".member.selected")
    turn(chromium, "groups?step=1")
    count(chromium, 2)
    assert chromium.execute_script(LIVING) == 0


def test_a_trained_group_has_the_trainers_numbers_beside_the_engines(
    chromium: Chrome, address: str, scene: Scene, folder: Path
) -> None:
    write_samples(scene, folder)
    go(chromium, address, "run")
    turn(chromium, "groups/math-0000000000?step=1&view=tokens&colour=mismatch")
    until(chromium, "the first 2 tokens")
    (first, second, *_) = chromium.find_elements(By.CSS_SELECTOR, ".tokens span")
    assert first.get_attribute("class") == second.get_attribute("class") == "p1"  # below 0.5 nats
    # by keyboard: the numbers of the second token
    chromium.find_element(By.CSS_SELECTOR, ".tokens").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    said = until(chromium, "logprob -0.200, trainer -0.450 (mismatch 0.250), entropy 1.750")
    assert "token 6" in said
    Select(chromium.find_element(By.ID, "colour")).select_by_value("entropy")
    WebDriverWait(chromium, PATIENCE_S).until(
        lambda b: b.find_element(By.CSS_SELECTOR, ".tokens span").get_attribute("class") == "p0"
    )
