"""The site that `make docs` builds, opened from disk by a browser."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.support.ui import WebDriverWait

from tests.programs import files_of_git
from tests.rolloutmq.conftest import ROOT
from tests.rolloutmq.web.conftest import chromium

__all__ = ["chromium"]

ANSWERS = {
    "out of memory": "docs/pages/troubleshooting.html",
    "resume after crash": "docs/pages/troubleshooting.html",
    "my judge raises": "docs/pages/troubleshooting.html",
    "add a worker": "docs/pages/troubleshooting.html",
    "weights & biases": "docs/pages/metrics.html",
    "stop a run": "docs/pages/troubleshooting.html",
    "delete a run": "docs/pages/troubleshooting.html",
    "disk full": "docs/pages/troubleshooting.html",
    "lost groups": "docs/pages/troubleshooting.html",
    "workers are idle": "docs/pages/troubleshooting.html",
    "export checkpoint": "docs/pages/troubleshooting.html",
    "install": "index.html",
    "reward function": "docs/pages/your_judge.html",
    "custom dataset": "docs/pages/your_data_set.html",
    "multi turn": "docs/pages/tools_and_agents.html",
    "kubernetes": "docker/index.html",
    "slurm": "docker/index.html",
    "multi-node training": "docs/pages/many_gpus.html",
    "lora": "docs/pages/engines.html",
    "tensorboard": "docs/pages/metrics.html",
    "verl": "docs/pages/trainers/verl.html",
    "sandbox": "SECURITY.html",
    "learning rate": "docs/pages/config_reference.html",
    "importance sampling": "docs/pages/loss.html",
    "lease": "docs/pages/concepts.html",
    "lineage": "docs/pages/concepts.html",
    "staleness": "docs/pages/concepts.html",
    "dead letter": "docs/pages/concepts.html",
    "quarantine": "docs/pages/concepts.html",
    "manifest": "docs/pages/concepts.html",
    "glossary": "docs/pages/concepts.html",
    "upgrade": "docs/pages/upgrading.html",
    "schema": "docs/pages/upgrading.html",
    "sentinel": "docs/pages/servers.html",
    "managed redis": "docs/pages/servers.html",
    "eviction": "docs/pages/servers.html",
    "rotate password": "docs/pages/servers.html",
    "sizing": "docs/pages/servers.html",
    "own training loop": "docs/pages/your_trainer.html",
    "gateway": "docs/pages/tools_and_agents.html",
    "entropy": "docs/pages/metrics.html",
    "distillation": "docs/pages/distillation.html",
}
SEARCH = """
const [questions, done] = arguments
const worker = new Worker(JSON.parse(__config.textContent).search)
const found = []
worker.onmessage = ({data}) => {
    if (data.data) found.push(data.data.items[0]?.[0].location.split('#')[0] || 'index.html')
    if (found.length == questions.length) return done(found)
    worker.postMessage({type: 2, data: questions[found.length]})
}
worker.postMessage({type: 0, data: {...__index, options: {}}})
"""
"""Asks the site's own search worker one question after another; calls `done` with the first pages."""


@pytest.fixture
def site() -> Path:
    built = ROOT / "build" / "site"
    pages = [path for path in files_of_git() if path.suffix in (".md", ".ipynb", ".yml")]
    index = built / "search" / "search_index.json"
    if index.exists() and index.stat().st_mtime > max(path.stat().st_mtime for path in pages):
        return built
    assert not os.environ.get("CI"), "`make docs` comes first"
    pytest.skip("`make docs` builds the site")


@pytest.mark.parametrize("page", ["index.html", "docs/pages/demo.html"])
def test_search_works_from_disk(chromium: Chrome, site: Path, page: str) -> None:
    chromium.get((site / page).as_uri() + "?q=staleness")
    found = WebDriverWait(chromium, 400).until(
        lambda browser: browser.execute_script(
            "return [...document.querySelectorAll('.md-search-result__item')]"
            ".map(item => item.innerText)"
        )
    )
    assert "staleness" in " ".join(found).lower()


def test_a_page_about_a_term_comes_before_those_that_mention_it(
    chromium: Chrome, site: Path
) -> None:
    chromium.get((site / "index.html").as_uri())
    chromium.set_script_timeout(400)
    config = "const __config = document.getElementById('__config');"
    found = chromium.execute_async_script(config + SEARCH, list(ANSWERS))
    wrong = {q: page for q, page in zip(ANSWERS, found, strict=True) if page != ANSWERS[q]}
    assert wrong == {}
