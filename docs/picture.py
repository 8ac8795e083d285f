"""Take the picture of the README from a demo that is over: `python -m docs.picture runs/demo`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

PICTURE = Path(__file__).with_name("pages") / "web.png"
SIZE = (1280, 1500)
READY = "return document.body.innerText.length > 600"


def main(run_dir: str) -> None:
    command = [sys.executable, "-m", "rolloutmq", "web", "--port", "0", "--run-dir", run_dir]
    options = Options()
    options.binary_location = shutil.which("chromium") or "chromium"
    with (
        tempfile.TemporaryDirectory() as profile,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as web,
    ):
        assert web.stdout
        for flag in (
            "--headless=new",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(flag)
        try:
            with webdriver.Chrome(options, Service(shutil.which("chromedriver"))) as browser:
                browser.set_page_load_timeout(100)
                browser.set_window_size(*SIZE)
                browser.get(web.stdout.readline().split()[-1])
                WebDriverWait(browser, 120).until(lambda page: page.execute_script(READY))
                browser.save_screenshot(str(PICTURE))
        finally:
            web.terminate()


if __name__ == "__main__":
    main(sys.argv[1])
