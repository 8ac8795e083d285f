"""The site that `make docs` builds, opened from disk by a browser."""

from __future__ import annotations

import os

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.support.ui import WebDriverWait

from tests.rolloutmq.conftest import ROOT
from tests.rolloutmq.web.conftest import chromium

__all__ = ["chromium"]

SITE = ROOT / "build" / "site"


@pytest.mark.parametrize("page", ["index.html", "docs/pages/demo.html"])
def test_search_works_from_disk(chromium: Chrome, page: str) -> None:
    if not (SITE / page).exists():
        assert not os.environ.get("CI"), "`make docs` comes first"
        pytest.skip("`make docs` builds the site")
    chromium.get((SITE / page).as_uri() + "?q=staleness")
    found = WebDriverWait(chromium, 30).until(
        lambda browser: browser.execute_script(
            "return [...document.querySelectorAll('.md-search-result__item')]"
            ".map(item => item.innerText)"
        )
    )
    assert "staleness" in " ".join(found).lower()
