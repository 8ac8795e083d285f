"""Set up .venv with everything the project needs; `make setup` runs it. Standard library only.

    python3 bootstrap.py            detects an NVIDIA GPU and installs the CPU or the CUDA builds
    python3 bootstrap.py --build cpu|cuda|none

A finished set-up writes a stamp, so that the next call returns at once; it is repeated when
pyproject.toml, a lock file or this file change. After an interruption it continues: installed
packages are checked file by file. This file must be valid Python 3.8, so that an old interpreter
can report that it is too old.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
STAMP = VENV / "setup.json"
VENV_VERSION = VENV / "python-version.txt"
"""of the Python that made .venv; written once .venv is whole"""
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
    layout = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    options.add_argument(
        "--build", choices=sorted(BUILDS), default=os.environ.get("ROLLOUTMQ_BUILD")
    )
    options.add_argument("--find-broken", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.find_broken:
        print("\n".join(find_broken(read_lock())))
        return 0
    try:
        check_python()
        set_up(chosen.build or detect_build())
    except SetupError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted; the same command continues it", file=sys.stderr)
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
    STAMP.unlink(missing_ok=True)
    make_venv()
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


# the three ways
# ---------------------------------------------------------------------------------------


def install_cpu() -> None:
    """Install exactly the lock file, without resolving; its header gives the reasons."""
    lock = read_lock()
    install_cpu_torch(f"torch=={lock['torch']}")
    pip(f"{len(lock) - 1} packages, vLLM among them", *LOCKED, str(CPU_HASHES))
    broken = ask_broken()
    if broken:
        pip(f"{len(broken)} damaged or missing packages", "--no-deps", "--force-reinstall", *broken)
        if left := ask_broken():
            raise SetupError(f"still damaged: {' '.join(left)}; remove {VENV.name} and start again")


def install_cpu_torch(torch: str) -> None:
    try:
        pip(f"{torch} (about 200 MB)", "--no-deps", torch, failure="not in pip's own sources")
    except SetupError:
        pip(f"{torch} from PyTorch's CPU index", "--no-deps", "--extra-index-url", CPU_INDEX, torch)


def install_cuda() -> None:
    """Install exactly the lock file for CUDA."""
    if sys.version_info >= (3, 14):
        raise SetupError("vLLM for CUDA needs Python 3.11 to 3.13: make PYTHON=python3.13")
    pip("vLLM, torch and CUDA libraries (several GB)", *LOCKED, str(CUDA_LOCK))


def install_without_vllm() -> None:
    if platform.system() == "Linux":
        install_cpu_torch(f"torch=={read_lock()['torch']}")
    pip("packages", "rolloutmq[demo,dev] @ " + ROOT.as_uri())


# steps
# ------------------------------------------------------------------------------------------------


def make_venv() -> None:
    version = platform.python_version()
    if (
        PYTHON.exists()
        and VENV_VERSION.exists()
        and VENV_VERSION.read_text(encoding="utf-8") == version
    ):
        return
    # Python in a .venv that is half made has no pip, or installs into the system's packages.
    VENV_VERSION.unlink(missing_ok=True)
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        output = (made.stdout + made.stderr).strip()
        raise SetupError(
            f"cannot create {VENV}; on Debian and Ubuntu: apt install python3-venv\n{output}"
        )
    VENV_VERSION.write_text(version, encoding="utf-8")


def pip(what: str, *arguments: str, failure: str = "failed") -> None:
    """Run `pip install` with a line of progress; its output goes to the log."""
    command = [
        str(PYTHON),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
    ]
    command += arguments
    lines: list[str] = []
    with Progress(what, failure) as progress, LOG.open("a", encoding="utf-8") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        if run(command, log, lines, progress) != 0:
            errors = [line for line in lines if line.startswith("ERROR")] or lines[-5:]
            raise SetupError(
                f"pip could not install {what}:\n  "
                + "\n  ".join(errors)
                + f"\nThe output of pip is in {LOG}. "
                + "Behind a proxy or a mirror, configure pip first, then run the same command."
            )


def run(command: list[str], log: TextIO, lines: list[str], progress: Progress) -> int:
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            log.write(line)
            lines.append(line.rstrip())
            progress.see(line)
    return process.returncode


class Progress:
    """Prints one line per step: updated in place on a terminal, once at the end elsewhere."""

    def __init__(self, what: str, failure: str) -> None:
        self.what = what
        self.failure = failure
        self.packages = 0
        self.phase = "resolving"
        self.started = time.monotonic()
        self.is_live = sys.stdout.isatty()
        self.finished = threading.Event()
        self.ticker = threading.Thread(target=self.tick, daemon=True)

    def __enter__(self) -> Progress:
        if not self.is_live:
            print(f"  {self.what} ...", flush=True)
        self.ticker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.finished.set()
        self.ticker.join()
        if kind is None:
            self.phase = "done"
        else:
            self.phase = "interrupted" if kind is KeyboardInterrupt else self.failure
        self.show("\n")

    def see(self, line: str) -> None:
        word = line.split(" ", 1)[0]
        if word in ("Collecting", "Processing", "Obtaining"):
            self.packages += 1
            self.phase = f"package {self.packages}"
        elif word == "Installing":
            self.phase = "copying files"

    def tick(self) -> None:
        while not self.finished.wait(0.5):
            if self.is_live:
                self.show("")

    def show(self, end: str) -> None:
        seconds = time.monotonic() - self.started
        start = "\r\033[K" if self.is_live else ""
        print(f"{start}  {self.what}: {self.phase}, {seconds:.0f} s", end=end, flush=True)


# what is there
# ----------------------------------------------------------------------------------------


def read_lock() -> dict[str, str]:
    """Return the version of each package of the lock file."""
    lines = [line.strip() for line in LOCK.read_text(encoding="utf-8").splitlines()]
    pairs = [line.split("==", 1) for line in lines if line and not line.startswith("#")]
    return {name: version for name, version in pairs}


def ask_broken() -> list[str]:
    asked = subprocess.run(
        [str(PYTHON), str(ROOT / "bootstrap.py"), "--find-broken"],
        capture_output=True,
        text=True,
        check=True,
    )
    return asked.stdout.split()


def find_broken(lock: dict[str, str]) -> list[str]:
    """Return requirements that are missing or incompletely installed. Runs in the venv."""
    return [f"{name}=={version}" for name, version in lock.items() if not is_whole(name, version)]


def is_whole(name: str, version: str) -> bool:
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    files = found.files or []
    return found.version == version and bool(files) and all(is_there(file) for file in files)


def is_there(file: importlib.metadata.PackagePath) -> bool:
    path = Path(str(file.locate()))
    # Bytecode may be missing: Python writes it again.
    return (
        file.suffix == ".pyc"
        or file.size is None
        or (path.is_file() and path.stat().st_size == file.size)
    )


if __name__ == "__main__":
    sys.exit(main())
