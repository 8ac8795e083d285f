from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.config.config import Config
from tests.programs import ROOT, files_of_git

PAGES = sorted(
    page
    for pattern in (
        "README.md", "SECURITY.md", "DECISIONS.md", "[a-z]*/README.md", "docs/pages/*.md",
        "producer_workers/*.md", "tests/*/*.md",
    )
    for page in ROOT.glob(pattern)
    if page.name != "compared.md"  # which names files of others
)  # fmt: skip
PACKAGES = (
    "buffer", "producer_workers", "consumer", "rolloutmq", "examples", "tests", "proofs",
    "benchmarks",
)  # fmt: skip
FOLDERS = (*PACKAGES, "configs", "docker", "docs")
KEY = re.compile(r"\[([a-z_]+(?:\.[\w<>]+)*)\](?: ([a-z_]+(?:\.[a-z_]+)*))?")
DEFINITION = re.compile(r"(?:def|class) (\w+)|\b(\w+)(?:: [^=\n]+)? = ")
FOREIGN = {
    "AsyncGRPOTrainer", "DataLoader", "DataProto", "IterableDataset", "SamplesGenerator",
    "generate_samples", "generate_sequences",
}  # fmt: skip
"""Names of other projects; those of docs/pages/moving.md are mostly such."""
NOT_CODE = {"[web]", "[row]", "consumer.py"}
"""An extra, an index, and a file of the reader's."""


@cache
def code_files() -> list[Path]:
    return files_of_git()


@cache
def basenames() -> set[str]:
    return {path.name for path in code_files()}


@cache
def defined_names() -> set[str]:
    """Return everything that code of the project defines: functions, classes, attributes."""
    texts = [path.read_text(encoding="utf-8") for path in code_files() if path.suffix == ".py"]
    return {name for text in texts for pair in DEFINITION.findall(text) for name in pair}


def is_module_path(name: str) -> bool:
    """Return whether `package.module.name` is a module, or something that a module defines."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:length])
        if place.with_suffix(".py").is_file() or place.is_dir():
            return all(part in defined_names() for part in parts[length:])
    return False


def is_key(section: str, key: str) -> bool:
    """Return whether a config has `[section] key`."""
    names = [*section.split("."), *(key.split(".") if key else [])]
    if names[0] == "tasks" and len(names) > 1:
        names[1:2] = ["any"]
    nodes = [schema()]
    for name in names:
        nodes = [
            inner for node in nodes for member in members(node) for inner in child(member, name)
        ]
    return bool(nodes)


@cache
def schema() -> dict[str, Any]:
    return Config.model_json_schema()


def members(node: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tables that a place of the schema may hold."""
    if reference := node.get("$ref"):
        return members(schema()["$defs"][reference.rpartition("/")[2]])
    choices = node.get("anyOf") or node.get("oneOf")
    return [each for one in choices for each in members(one)] if choices else [node]


def child(node: dict[str, Any], name: str) -> list[dict[str, Any]]:
    more = node.get("additionalProperties")
    if name in node.get("properties", {}):
        return [node["properties"][name]]
    return [more if isinstance(more, dict) else {}] if more else []


def fault(name: str) -> str:
    """Return why the code name is wrong; "" where it exists, or is no name of this project."""
    if name in NOT_CODE:
        return ""
    if found := re.fullmatch(r"([\w./]+\.py)::(\w+)", name):
        files = [file for folder in (ROOT, ROOT / "tests") if (file := folder / found[1]).exists()]
        defined = any(f"def {found[2]}(" in file.read_text(encoding="utf-8") for file in files)
        return "" if defined else "no such test"
    if found := re.fullmatch(r"chaos:(\w+)", name):
        return "" if f"_{found[1]}" in defined_names() else "no such fault"
    if found := re.fullmatch(r"bench:(\w+\.py)", name):
        return "" if (ROOT / "benchmarks" / found[1]).exists() else "no such benchmark"
    if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*", name):
        return "" if (ROOT / name).exists() else "no such file"
    if re.fullmatch(r"[\w-]+\.(?:py|lua)", name):
        return "" if name in basenames() or name.startswith(("my_", "test_my_")) else "no such file"
    if re.fullmatch(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+(?:\(\))?", name):
        return "" if is_module_path(name.removesuffix("()")) else "no such module or name"
    if found := KEY.fullmatch(name):
        return "" if is_key(found[1], found[2] or "") else "no such config key"
    if found := re.fullmatch(r"([A-Z][a-z]+[A-Z]\w*|[a-z]+_\w+(?=\())(?:\(.*\))?", name):
        known = found[1] in defined_names() or found[1] in FOREIGN
        return "" if known else "nothing has this name"
    return ""


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES])
def test_code_names_of_a_page_exist(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    names = dict.fromkeys(re.findall(r"`([^`\n]+)`", text))
    faults = {name: why for name in names if (why := fault(name))}
    if page.endswith("moving.md"):
        faults = {name: why for name, why in faults.items() if why != "nothing has this name"}
    assert faults == {}
