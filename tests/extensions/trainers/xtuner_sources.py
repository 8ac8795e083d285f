"""XTuner v1 from its sources; its data sets, which import torchvision, are stubbed as in its own tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tests.extensions.trainers.sources import source_of

URL = "https://github.com/InternLM/xtuner"
COMMIT = "b934f462095c1e750229de35367c50ae36caa786"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"xtuner_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_xtuner() -> Path:
    folder = source_of("XTUNER", URL, COMMIT)
    if "xtuner.v1.datasets" not in sys.modules:
        load(folder / "tests" / "rl" / "conftest.py")._install_dataset_stubs()
    return folder
