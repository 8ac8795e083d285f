"""Set up .venv with everything the project needs; `make setup` runs it. Standard library only.

    python3 bootstrap.py            detects an NVIDIA GPU and installs the CPU or the CUDA builds
    python3 bootstrap.py --build cpu|cuda|none

A finished set-up writes a stamp, so that the next call returns at once; it is repeated when
pyproject.toml, a lock file or this file change. An interrupted one starts anew; pip keeps what it
has downloaded. This file must be valid Python 3.8, so that an old interpreter can report that it is
too old.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
STAMP = VENV / "setup.json"
LOCK = ROOT / "requirements" / "cpu.txt"
CPU_HASHES = ROOT / "requirements" / "cpu.lock"
"""the same versions, without torch, with the hashes of their files"""
CUDA_LOCK = ROOT / "requirements" / "cuda.lock"
LOCKED = ("--no-deps", "--require-hashes", "--requirement")
"""Options of pip: a file whose content differs from the locked one is refused."""
OLDEST, TOO_NEW = (3, 11), (3, 15)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's index of CPU builds; used only if pip's configured indexes lack the build."""

BUILDS = {
    "cpu": "CPU builds of torch and vLLM",
    "cuda": "CUDA builds of torch and vLLM",
    "none": "torch without vLLM (use the simulated or the transformers engine)",
}


class SetupError(Exception):
    """Raised when the set-up fails; says what went wrong, and what to do."""


def main() -> int:
    options = argparse.ArgumentParser(description="Set up .venv with everything that is needed.")
    options.add_argument(
        "--build", choices=sorted(BUILDS), default=os.environ.get("ROLLOUTMQ_BUILD")
    )
    chosen = options.parse_args()
    try:
        check_python()
        set_up(chosen.build or detect_build())
    except SetupError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted; the same command starts it again", file=sys.stderr)
        return 130
    return 0


def set_up(build: str) -> None:
    wanted = fingerprint(build)
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text(encoding="utf-8") == wanted:
        return
    started = time.monotonic()
    print(
        f"setting up {VENV.name} with Python {platform.python_version()}: {BUILDS[build]}",
        flush=True,
    )
    make_venv()
    STAMP.unlink(missing_ok=True)
    {"cpu": install_cpu, "cuda": install_cuda, "none": install_without_vllm}[build]()
    # After the dependencies and without them: pip must not resolve again.
    pip("rolloutmq itself", "--no-deps", "--no-build-isolation", "--editable", ".")
    STAMP.write_text(wanted, encoding="utf-8")
    print(f"set-up done in {time.monotonic() - started:.0f} s", flush=True)
    print(f"`source {VENV.name}/bin/activate` puts `rolloutmq` on this shell's PATH\n", flush=True)


# what this machine is
# ---------------------------------------------------------------------------------


def check_python() -> None:
    found = sys.version_info[:2]
    if OLDEST <= found < TOO_NEW:
        return
    others = [name for minor in (13, 12, 11, 14) if shutil.which(name := f"python3.{minor}")]
    better = others[0] if others else "/path/to/python3.12"
    raise SetupError(
        f"Python 3.11 to 3.14 is needed, not {platform.python_version()}; use another: "
        f"make PYTHON={better}"
    )


def detect_build() -> str:
    if has_nvidia_gpu():
        return "cuda"
    if platform.system() == "Linux" and platform.machine() in ("x86_64", "AMD64"):
        return "cpu"
    print(
        f"vLLM's CPU wheels are for Linux on x86_64, this is {platform.system()} on "
        f"{platform.machine()}: "
        "everything else is installed; choose the simulated or the transformers engine "
        "in the config",
        flush=True,
    )
    return "none"


def has_nvidia_gpu() -> bool:
    gpus = Path("/proc/driver/nvidia/gpus")
    if gpus.is_dir() and any(gpus.iterdir()):
        return True
    # Under WSL there is no /proc/driver/nvidia.
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=60, check=False)
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def fingerprint(build: str) -> str:
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", LOCK, CPU_HASHES, CUDA_LOCK, Path(__file__)):
        digest.update(path.read_bytes())
    python = platform.python_version()
    facts = {"build": build, "python": python, "root": str(ROOT), "files": digest.hexdigest()}
    return json.dumps(facts, sort_keys=True) + "\n"


# steps
# ------------------------------------------------------------------------------------------------


def make_venv() -> None:
    """Make .venv, unless a finished set-up left one of this Python."""
    version = platform.python_version()
    if STAMP.exists() and json.loads(STAMP.read_text(encoding="utf-8"))["python"] == version:
        return
    STAMP.unlink(missing_ok=True)
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        output = (made.stdout + made.stderr).strip()
        raise SetupError(
            f"cannot create {VENV}; on Debian and Ubuntu: apt install python3-venv\n{output}"
        )


def install_cpu() -> None:
    """Install exactly the lock file, without resolving; its header gives the reasons."""
    install_cpu_torch()
    pip("packages, vLLM among them", *LOCKED, str(CPU_HASHES))


def install_cpu_torch() -> None:
    found = re.search(r"^torch==.+", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    torch = found[0].strip()
    try:
        pip(f"{torch} (about 200 MB)", "--no-deps", torch)
    except SetupError:  # not in pip's own sources
        pip(f"{torch} from PyTorch's CPU index", "--no-deps", "--extra-index-url", CPU_INDEX, torch)


def install_cuda() -> None:
    """Install exactly the lock file for CUDA."""
    if sys.version_info >= (3, 14):
        raise SetupError("vLLM for CUDA needs Python 3.11 to 3.13: make PYTHON=python3.13")
    pip("vLLM, torch and CUDA libraries (several GB)", *LOCKED, str(CUDA_LOCK))


def install_without_vllm() -> None:
    if platform.system() == "Linux":
        install_cpu_torch()
    pip("packages", "rolloutmq[demo,dev] @ " + ROOT.as_uri())


def pip(what: str, *arguments: str) -> None:
    """Run `pip install`; its output goes to the log. Raises SetupError."""
    print(f"  {what} ...", flush=True)
    options = ["--disable-pip-version-check", "--progress-bar", "off"]
    command = [str(PYTHON), "-m", "pip", "install", *options, *arguments]
    with LOG.open("a", encoding="utf-8") as log:
        begin = log.tell()
        done = subprocess.run(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, text=True, check=False
        )
    if done.returncode != 0:
        lines = LOG.read_bytes()[begin:].decode("utf-8", "replace").splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-5:]
        raise SetupError(
            f"pip could not install {what}:\n  "
            + "\n  ".join(errors)
            + f"\nThe output of pip is in {LOG}. "
            + "Behind a proxy or a mirror, configure pip first, then run the same command."
        )


if __name__ == "__main__":
    sys.exit(main())
