from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LINUX = {"sys_platform": "linux", "platform_machine": "x86_64"}
STALE = "`make lock` writes requirements/*.lock anew"


def pins(name: str) -> list[Requirement]:
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    lines = text.replace("\\\n", " ").splitlines()
    return [Requirement(line.split(" --hash")[0]) for line in lines if re.match(r"\w", line)]


def versions(name: str) -> dict[str, str]:
    return {
        canonicalize_name(pin.name): str(pin.specifier)
        for pin in pins(name)
        if pin.marker is None or pin.marker.evaluate({**LINUX, "python_full_version": "3.11.9"})
    }


@pytest.mark.parametrize("name", ["cpu.lock", "cuda.lock"])
def test_every_package_has_a_version_and_hashes_and_names_no_host(name: str) -> None:
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    assert "://" not in text
    assert "--index" not in text
    for line in text.replace("\\\n", " ").splitlines():
        if not line.startswith("#"):
            assert re.fullmatch(r"\S+==\S+( ; [^\\]+?)?\s+(--hash=sha256:[0-9a-f]{64}\s*)+", line)


def test_the_locks_hold_what_is_tested() -> None:
    """cpu.lock is cpu.txt without torch; CUDA has the same versions where vLLM lets it."""
    tested = versions("cpu.txt")
    assert tested.pop("torch") == "==2.13.0+cpu"
    assert versions("cpu.lock") == tested, STALE
    cuda = versions("cuda.lock")
    other = {name for name, version in tested.items() if cuda.get(name) not in (version, None)}
    assert len(other) <= 3, (other, STALE)


@pytest.mark.parametrize("python", ["3.11.0", "3.12.0", "3.13.0"])
def test_the_packages_of_the_lock_serve_each_version_of_python(python: str) -> None:
    """The locks are installed without resolving, and some packages need others on old versions.

    What a package needs on the Python of this test, too, is left out on purpose (cpu.txt).
    """
    environment = LINUX | {"extra": "", "python_full_version": python, "python_version": python[:4]}
    locked = versions("cpu.txt")
    for name in locked | versions("docs.txt"):
        try:
            about = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue  # `make docs` has not run, or this is another build
        assert python in SpecifierSet(about["Requires-Python"] or ""), name
        for needed in map(Requirement, metadata.requires(name) or []):
            marker = needed.marker
            if marker and marker.evaluate(environment) and not marker.evaluate():
                assert canonicalize_name(needed.name) in locked, (name, str(needed))


def test_the_lock_for_cuda_has_every_dependency_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [Requirement(line) for line in project["dependencies"]]
    names = ["vllm-cuda", "demo", "dev"]
    for name in names:
        found = [Requirement(line) for line in extras[name]]
        names += [extra for one in found if one.name == "rolloutmq" for extra in one.extras]
        asked += [one for one in found if one.name != "rolloutmq"]
    locked = versions("cuda.lock")
    for one in asked:
        if one.marker is None or one.marker.evaluate(LINUX):
            version = locked.get(canonicalize_name(one.name), "")
            assert version.removeprefix("==") in one.specifier if version else False, (one, STALE)
