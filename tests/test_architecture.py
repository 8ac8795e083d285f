from __future__ import annotations

import ast
import sys
import sysconfig
from pathlib import Path

from tests.programs import ROOT, printed, python

PACKAGES = ("rolloutmq", "buffer", "producer_workers", "consumer")
HEAVY = {"torch", "vllm", "rq", "transformers", "reasoning_gym", "matplotlib"}


def heavy_modules_after(code: str) -> set[str]:
    """Top-level heavy packages that a fresh interpreter has loaded after `code`."""
    report = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    return HEAVY & set(python("-c", f"{code}\n{report}").splitlines()[-1].split())


def test_import_contracts_hold() -> None:
    assert printed(Path(sysconfig.get_path("scripts")) / "lint-imports", "--no-cache")


def test_buffer_loads_nothing_heavy_when_all_of_it_is_imported() -> None:
    files = [path for path in (ROOT / "buffer").rglob("*.py") if path.stem != "__init__"]
    names = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)
    imports = "\n".join(f"import {name}" for name in names)
    assert heavy_modules_after(f"import buffer\n{imports}") == set()


def test_no_file_has_the_name_of_a_stdlib_module() -> None:
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    assert [str(path) for path in files if path.stem in sys.stdlib_module_names] == []


def test_nothing_is_unpickled_or_evaluated() -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "joblib"}
    calls = {"eval", "exec", "compile", "__import__"}
    options = {
        "shell": True,
        "allow_pickle": True,
        "weights_only": False,
        "trust_remote_code": True,
    }
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    found = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if forbidden & {name.partition(".")[0] for name in names}:
                found.append(f"{path}: imports {names}")
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in calls:
                found.append(f"{path}:{node.lineno} calls {ast.unparse(node.func)}")
            if isinstance(node, ast.keyword) and getattr(node.value, "value", None) is options.get(
                node.arg or "", ...
            ):
                found.append(f"{path}:{node.value.lineno} says {ast.unparse(node)}")
    assert found == []
