"""The notebook as a page: its cells, and what they printed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.reference.markdown import verbatim

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "tour.ipynb"


def notebook_page() -> str:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "\n".join(part for cell in cells for part in _parts(cell))


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    text = "".join(cell["source"])
    yield text + "\n" if cell["cell_type"] == "markdown" else f"```python\n{text}\n```\n"
    for output in cell.get("outputs", []):
        if "text" in output:
            yield verbatim("".join(output["text"]).rstrip())
        elif picture := output["data"].get("image/png"):
            yield f"![](data:image/png;base64,{picture.strip()})\n"
