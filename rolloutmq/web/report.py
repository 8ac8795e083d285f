"""A run's folder as one HTML file: the page of `rolloutmq web` with the data inside.

Stylesheets, scripts and modules are inlined, so it needs neither a server nor a network.
"""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from consumer.handle.sample_log import SampleLog
from rolloutmq.views.about_run import about_run
from rolloutmq.views.run_folder import RunFolder, letters_by_cause
from rolloutmq.web.panels import Source, read_panels
from rolloutmq.web.series import Mark, RunSeries

STATIC = Path(__file__).resolve().parent / "static"
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' data:; img-src data:"
)


def write_report(folder: Path, file: Path, account: str = "") -> int:
    """Write the report of a run's folder; return its bytes, 0 for an empty one.

    `account`: that of a run which is about to end; its record has it later.
    """
    saved = read_contents(folder, account)
    series = saved["series"]
    has_steps = series["steps"]["x"] or series["evaluations"]["x"]
    if not (has_steps or saved["dead"]["total"] or saved["findings"]):
        return 0
    page = _page(saved).encode()
    file.write_bytes(page)
    return len(page)


def _page(saved: dict[str, Any]) -> str:
    # < as an escape: no text can end the block
    data = orjson.dumps(saved, option=orjson.OPT_NON_STR_KEYS).decode().replace("<", "\\u003c")
    # modules as data URLs, by their paths: one in a data URL cannot import by a relative path
    imports = {}
    for file in sorted(STATIC.rglob("*.js")):
        parts = re.split(r'"(\.\.?/[\w./]+\.js)"', file.read_text(encoding="utf-8"))
        for place in range(1, len(parts), 2):
            parts[place] = f'"{_name((file.parent / parts[place]).resolve())}"'
        code = b64encode("".join(parts).encode()).decode()
        imports[_name(file)] = f"data:text/javascript;base64,{code}"
    modules = orjson.dumps({"imports": imports}).decode()
    page = (STATIC / "page.html").read_text(encoding="utf-8")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    page = re.sub(r'<link rel="icon".*?>', policy, page)
    page = re.sub(r'<link rel="stylesheet" href="/static/(.*?)">', _inlined, page)
    page = re.sub(r'<script src="/static/(.*?)".*?></script>', _inlined, page)
    start, end = page.split('<script type="module" src="/static/frame/frame.js"></script>')
    return (
        f'{start}<script type="importmap">{modules}</script>\n'
        f'<script type="application/json" id="saved">{data}</script>\n'
        f'<script type="module">import "frame/frame.js";</script>{end}'
    )


def _inlined(found: re.Match[str]) -> str:
    tag = "style" if found[0].startswith("<link") else "script"
    return f"<{tag}>{(STATIC / found[1]).read_text(encoding='utf-8')}</{tag}>"


def _name(file: Path) -> str:
    return file.relative_to(STATIC).as_posix()


def read_contents(folder: Path, account: str = "") -> dict[str, Any]:
    run = RunFolder(folder)
    series = RunSeries(folder)
    series.refresh()
    curves, _ = series.since(Mark())
    samples = SampleLog(folder)
    return {
        "run": run.name,
        "about": about_run(folder, account=account),
        "panels": read_panels(Source(folder, steps=run.log.steps)),
        "findings": [asdict(symptom) for symptom in run.findings],
        "series": curves | {"thinned": False},
        "steps": samples.steps(),
        "samples": [sample for step in _sampled(samples) for sample in samples.read(step)],
        "dead": letters_by_cause(run.letters, len(run.letters)),
    }


def _sampled(samples: SampleLog) -> list[int]:
    """Return the steps whose samples are shown."""
    span = samples.steps()
    if span is None:
        return []
    first, last = span
    count = min(6, last - first + 1)  # the first, the last, and some between
    return sorted({round(first + (last - first) * i / max(count - 1, 1)) for i in range(count)})
