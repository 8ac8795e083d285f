"""A populated run, its page from this process or from `rolloutmq web`, and a headless Chromium that
looks at it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
import uvicorn
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from buffer.redis.server.embedded import EmbeddedServer
from rolloutmq.web.access import Access
from rolloutmq.web.app import make_app
from tests.rolloutmq.conftest import ROOT, scene, server, store
from tests.rolloutmq.populate import Scene

__all__ = ["scene", "server", "store"]

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-dev-shm-usage")  # fmt: skip


@pytest.fixture
def address(scene: Scene, server: EmbeddedServer) -> Iterator[str]:
    """Where the page is, with its token; served from a thread of this process."""
    access = Access("secret")
    serves = uvicorn.Server(uvicorn.Config("", log_level="warning"))
    serves.config.app = make_app(
        scene.run,
        run_dir=server.folder,
        access=access,
        hosts=["127.0.0.1"],
        is_over=lambda: serves.should_exit,
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = Thread(target=serves.run, args=([listening],))
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/#token=secret"
        serves.should_exit = True
        thread.join()


@contextmanager
def serving(run_dir: Path, *options: str) -> Iterator[str]:
    """`rolloutmq web` in a process of its own; its address, with the token."""
    command = [sys.executable, "-m", "rolloutmq", "web", "--port", "0", "--run-dir", str(run_dir)]
    command += options
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(400)
        process.stdout.close()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    browser = shutil.which("chromium")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        if os.environ.get("CI"):
            pytest.fail(
                "no chromium and chromedriver on this machine, and CI must look at the page"
            )
        pytest.skip("no chromium and chromedriver on this machine")
    options = Options()
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    with webdriver.Chrome(options, Service(driver)) as opened:
        yield opened


@pytest.fixture
def shots() -> Path:
    """Where screenshots go: build/web."""
    folder = ROOT / "build" / "web"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
