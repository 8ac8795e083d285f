"""`rolloutmq report`: one file, opened without a network, in which no text of a rollout is code."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import orjson
import pytest
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from buffer.errors import ConfigError
from buffer.groups.dead_letters import DeadLetter
from consumer.handle.dead_letter_file import write_dead_letters
from consumer.handle.step_log import StepWriter
from rolloutmq.run_owner import own
from tests.rolloutmq.conftest import ROOT, in_process
from tests.rolloutmq.web.conftest import serving
from tests.rolloutmq.web.test_charts import until_legend
from tests.rolloutmq.web.test_page import PATIENCE_S, turn, until

HOSTILE = (
    "</script><script>document.title = 'taken over'</script><img src=x onerror=alert(1)> &amp;"
)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The folder of a run that has ended, with a sample that would be code if it were not text."""
    folder = tmp_path / "demo"
    demo = str(ROOT / "configs" / "demo.toml")
    command = [demo, "--set", "redis.url=redis://u:s3cret@127.0.0.1:1/0"]
    with own(folder, "demo", command, 30) as owned:
        owned.note(owned.record.stage, account="account: lost 0 · in two stages 0")
    writer = StepWriter(folder)
    for step in range(1, 31):
        metrics = {
            "rewards/mean": step / 30,
            "loss/policy": 0.5,
            "odd/metric": 1.0,
            "failed/sums": 0.25,
        }
        writer.add_step(step, "l1", [f"sums-{step}"], metrics)
    writer.add_evaluation(0, "held_out", {"eval/accuracy": 0.25})
    writer.add_evaluation(30, "held_out", {"eval/accuracy": 0.75})
    (folder / "samples").mkdir()
    with gzip.open(folder / "samples" / "000001-step-00000001.jsonl.gz", "wb") as samples:
        for step in (1, 30):
            sample = {
                "step": step,
                "why": "best",
                "gid": f"sums-{step}",
                "messages": [{"role": "user", "content": HOSTILE}],
                "staleness": 0,
                "members": [
                    {
                        "index": 0, "status": "completed", "finish_reason": "stop",
                        "response": HOSTILE, "tokens": 3, "spans": [], "reward": {"score": 1.0},
                        "error": "",
                    }
                ],
            }  # fmt: skip
            samples.write(orjson.dumps(sample) + b"\n")
    return folder


def test_the_page_shows_the_run_and_loads_nothing(
    run_folder: Path, chromium: webdriver.Chrome, tmp_path: Path
) -> None:
    page = tmp_path / "r.html"
    done = in_process("report", str(run_folder), "-o", str(page))
    assert done.returncode == 0, done.stderr
    text = page.read_text(encoding="utf-8")
    assert "s3cret" not in text
    assert re.findall(r" (?:src|href)=[\"'](?!#)[^\"' >]+", text.partition("<script")[0]) == []
    chromium.get("about:blank")
    chromium.get_log("browser")  # type: ignore[no-untyped-call]
    chromium.get(page.as_uri())
    WebDriverWait(chromium, PATIENCE_S).until(lambda _: chromium.title == "demo: rolloutmq report")
    shown = until(chromium, "Training")
    head = chromium.find_element("tag name", "header").text
    assert "step 30 of 30" in head
    assert "account: lost 0 · in two stages 0" in head
    assert "Groups by stage" not in shown
    for chart in ("reward", "evaluation", "loss"):
        until_legend(chromium, chart, {"reward": "1", "evaluation": "0.75", "loss": "0.5"}[chart])
    turn(chromium, "groups")
    until(chromium, "sums-30")
    turn(chromium, "groups/sums-30?step=30&view=text")
    assert HOSTILE in until(chromium, "taken over")
    assert chromium.find_elements("css selector", "main img, main script") == []
    turn(chromium, "about")
    assert "failed sums 25%" in until(chromium, "lost and cut")
    assert "qwen3" in until(chromium, "Versions").lower() or "demo" in until(chromium, "Versions")
    faults = [line for line in chromium.get_log("browser") if line["level"] == "SEVERE"]  # type: ignore[no-untyped-call]
    assert faults == []


@pytest.mark.slow
def test_web_shows_the_folder_of_a_run_whose_server_is_lost(
    run_folder: Path, chromium: webdriver.Chrome
) -> None:
    write_dead_letters(run_folder, [DeadLetter("sums-0000000007", HOSTILE, "w0", 3, 1000)])
    (run_folder / "logs").mkdir()
    (run_folder / "logs" / "trainer.log").write_text('{"time": "2026-11-26T06", "message": "hi"}\n')
    with serving(run_folder) as address:
        chromium.get(address)
        until(chromium, "has no embedded server", "#trouble")
        assert "step 30 of 30" in chromium.find_element("tag name", "header").text
        until_legend(chromium, "reward", "1")
        turn(chromium, "groups?step=1")
        until(chromium, "sums-1")
        turn(chromium, "dead")
        assert HOSTILE in until(chromium, "sums-0000000007")
        turn(chromium, "logs")
        until(chromium, "hi")
        turn(chromium, "about")
        until(chromium, "not here")
        nav = chromium.find_element("tag name", "nav").text
        assert ("Workers" in nav, "Control" in nav) == (False, False)


def test_a_folder_without_steps_is_refused(tmp_path: Path) -> None:
    done = in_process("report", str(tmp_path))
    assert done.returncode == ConfigError.exit_code
    assert "has no train step and no evaluation" in done.stderr
