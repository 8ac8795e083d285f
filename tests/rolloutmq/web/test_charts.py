from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from buffer.redis.server.embedded import EmbeddedServer
from tests.rolloutmq.web.test_page import DESK, PATIENCE_S, go, turn, until

VIEWS = (
    "run", "groups", "groups/math-0000000003", "workers", "workers/w0", "dead", "control", "events",
)  # fmt: skip


def log_steps(folder: Path, rewards: list[float], first: int = 1, lineage: str = "l1") -> None:
    """Append train steps to the log of a run."""
    folder.mkdir(exist_ok=True)
    with (folder / "steps.jsonl").open("ab") as log:
        for step, reward in enumerate(rewards, first):
            metrics = {
                "rewards/mean": reward, "rewards/std": 0.1, "time/step_s": 2.0, "time/wait_s": 0.5,
                "own/metric": reward,
            }  # fmt: skip
            line = {
                "step": step, "lineage": lineage, "gids": [], "ended_s": 1.8e9 + 60 * step,
                "metrics": metrics, "histograms": {"rewards": {"width": 0.5, "first": 0, "counts": [step, 0, 9]}},
            }  # fmt: skip
            log.write(orjson.dumps(line) + b"\n")


@pytest.fixture
def steps(chromium: Chrome, server: EmbeddedServer) -> Path:
    """The run's folder, with three train steps and an evaluation."""
    chromium.set_window_size(*DESK)
    for name in ("steps.jsonl", "evaluations.jsonl"):
        (server.folder / name).unlink(missing_ok=True)
    log_steps(server.folder, [0.1, 0.2, 0.3])
    line = {"step": 0, "task": "exam", "metrics": {"eval/accuracy": 0.25}}
    (server.folder / "evaluations.jsonl").write_bytes(orjson.dumps(line) + b"\n")
    return server.folder


def legend(chromium: Chrome, chart: str) -> str:
    return chromium.find_element(By.CSS_SELECTOR, f"[data-chart={chart}] .legend").text.replace(
        "\n", " "
    )


def until_legend(chromium: Chrome, chart: str, words: str) -> None:
    until(chromium, "Training")

    def is_shown(browser: Chrome) -> bool:
        # a chart is drawn when it comes into view, and what loads above it moves it out again
        place = browser.find_element(By.CSS_SELECTOR, f"[data-chart={chart}]")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", place)
        return words in legend(browser, chart)

    WebDriverWait(chromium, PATIENCE_S).until(is_shown, f"no {words!r}")


def cursors(chromium: Chrome) -> list[str]:
    """Where the cursor of two charts is, read at one moment: "step 7", "newest" or "not drawn"."""
    return [str(words) for words in chromium.execute_script(CURSORS)]


CURSORS = """
return ["reward", "parts"].map(
  (key) => document.querySelector(`[data-chart=${key}] .where`)?.textContent ?? "not drawn");
"""


def test_curves_grow_with_the_trainers_log_and_follow_a_restart(
    chromium: Chrome, address: str, steps: Path
) -> None:
    go(chromium, address, "run")
    until_legend(chromium, "reward", "mean 0.3")
    assert "exam 0.25" in legend(chromium, "evaluation")
    log_steps(steps, [0.45], first=4)
    until_legend(chromium, "reward", "mean 0.45")
    # a trainer that restarts from step 2 trains later steps again: its history is the one shown
    log_steps(steps, [0.7], first=3, lineage="l2")
    until_legend(chromium, "reward", "mean 0.7")
    plot = chromium.find_element(By.CSS_SELECTOR, "[data-chart=reward] .plot")
    assert "0.1 at first, 0.7 now, from 0.1 to 0.7" in str(plot.get_attribute("aria-label"))
    # the parts of a step and what is left of it
    until_legend(chromium, "parts", "wait 0.5")
    until_legend(chromium, "parts", "other 1.5")
    # how single rewards lie: most of the newest step's in the last bin
    until_legend(chromium, "rewards", "1 to 1.5: 9 of 12")
    # a metric that no chart knows is among the others
    chromium.find_element(By.XPATH, "//summary[text()='All other metrics']").click()
    until(chromium, "own/metric")


def errors(chromium: Chrome) -> list[str]:
    """What the browser complained about since the last call: scripts, styles, answers."""
    return [entry["message"] for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"]  # type: ignore[no-untyped-call]


def controls(chromium: Chrome) -> list[tuple[str, str]]:
    """Role and name of all that takes the focus or is disabled, as a screen reader is told them."""
    nodes = chromium.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    return [
        (node["role"]["value"], node["name"]["value"].strip())
        for node in nodes
        if {"focusable", "disabled"} & {each["name"] for each in node.get("properties", [])}
    ]


@pytest.mark.slow
def test_no_view_makes_the_browser_complain_and_all_controls_have_names(
    chromium: Chrome, address: str, steps: Path
) -> None:
    chromium.get("about:blank")
    errors(chromium)  # those of earlier tests
    go(chromium, address, "run")
    for view in VIEWS:
        turn(chromium, view)
        found = controls(chromium)
        assert len(found) > len(VIEWS)
        assert [role for role, name in found if not name] == ["main"], (view, found)
        assert len(chromium.find_elements(By.CSS_SELECTOR, "h1, main, nav")) == 3
        assert errors(chromium) == [], view
