"""Make the screenshots of docs/pages from a real run: `python -m docs.screenshots`.

The demo is trained twice, with different learning rates; the second run is shown while it
continues, beside the first. A first run with enough steps is used again: remove
build/screenshots for a new one. Needs Chromium and chromedriver; about 6 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "pages"
RUNS = ROOT / "build" / "screenshots"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
)
SETTLE_S = 3.0
"""Seconds after which a view has its data and has drawn it."""

COMPARE = """
document.querySelector(".menu summary").click();
for (const box of document.querySelectorAll(".sheet input")) if (!box.checked) box.click();
document.querySelector(".menu").open = false;
const smoothing = document.querySelector("[aria-label=Smoothing]");
smoothing.value = 0.8;
smoothing.dispatchEvent(new Event("input"));
"""
PAUSE = "document.querySelector('[data-key=pause]').click();"


@dataclass(frozen=True, slots=True)
class Shot:
    """One screenshot: of a view (#/VIEW), in pixels, after a script."""

    file: str
    view: str
    width: int = 1400
    height: int = 1000
    scheme: str = "light"
    script: str = ""


SHOTS = (
    Shot("web.png", "run", height=1180),
    Shot("web_compare.png", "run", scheme="dark", script=COMPARE),
    Shot("web_control.png", "control", height=760, script=PAUSE),
    Shot("web_workers.png", "workers/worker-0", height=760),
    Shot("web_phone.png", "run", width=390, height=844, scheme="dark"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="train steps of each run")
    steps = parser.parse_args().steps
    if _steps(RUNS / "lower-rate") < steps:
        subprocess.run(
            _run("lower-rate", steps, "learner.learning_rate=3e-4"), cwd=ROOT, check=True
        )
    shutil.rmtree(RUNS / "demo", ignore_errors=True)
    # the same warm-started model, so that both begin at the same reward
    shutil.copytree(RUNS / "lower-rate" / "model", RUNS / "demo" / "model")
    with _process(_run("demo", 10 * steps)) as training:
        _wait_for_steps(training, RUNS / "demo", steps)
        with _process(_web(), stdout=subprocess.PIPE) as web, _browser() as browser:
            assert web.stdout is not None
            address = web.stdout.readline().strip()
            for shot in SHOTS:
                _take(browser, address, shot)


def _run(name: str, steps: int, *settings: str) -> list[str]:
    command = [sys.executable, "-m", "rolloutmq", "run", "configs/demo.toml"]
    for setting in (f"run.dir={RUNS / name}", f"plan.steps={steps}", *settings):
        command += ["--set", setting]
    return command


def _web() -> list[str]:
    return [
        sys.executable,
        "-m",
        "rolloutmq",
        "web",
        "--port",
        "0",
        "--run-dir",
        str(RUNS / "demo"),
    ]


@contextmanager
def _process(command: list[str], stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start a command, and end it with SIGTERM."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=stdout, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _steps(folder: Path) -> int:
    log = folder / "steps.jsonl"
    return len(log.read_bytes().splitlines()) if log.is_file() else 0


def _wait_for_steps(training: subprocess.Popen[str], folder: Path, steps: int) -> None:
    while _steps(folder) < steps:
        if training.poll() is not None:
            sys.exit(f"the run ended before step {steps}: see {folder / 'logs'}")
        time.sleep(1.0)


@contextmanager
def _browser() -> Iterator[Chrome]:
    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for flag in FLAGS:
        options.add_argument(flag)
    with Chrome(options, Service(shutil.which("chromedriver"))) as browser:
        yield browser


def _take(browser: Chrome, address: str, shot: Shot) -> None:
    size = {"width": shot.width, "height": shot.height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"features": [{"name": "prefers-color-scheme", "value": shot.scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    browser.get("about:blank")
    browser.get(address)
    time.sleep(SETTLE_S)
    browser.execute_script(f"location.hash = '#/{shot.view}'")
    time.sleep(SETTLE_S)
    if shot.script:
        browser.execute_script(shot.script)
        time.sleep(SETTLE_S)
    browser.save_screenshot(str(PAGES / shot.file))


if __name__ == "__main__":
    main()
