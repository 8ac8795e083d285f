from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.errors import ConfigError, JudgeError, SandboxUnavailable
from producer_workers.http_client import LONGEST_ANSWER
from producer_workers.judges.built_in import python_tests
from producer_workers.judges.load import load_judge
from producer_workers.user_code import bubblewrap
from producer_workers.user_code.sandbox import Limits, ProgramResult, check_sandbox, run_program
from tests.producer_workers.http_service import http_service
from tests.producer_workers.user_code.cage import needs_bubblewrap

QUICK = Limits(time_s=20.0, disk_mb=4)
HERE = Path(__file__).resolve()

each_sandbox = pytest.mark.parametrize(
    "sandbox", ["weak", pytest.param("bubblewrap", marks=needs_bubblewrap)]
)


def attack(program: str, limits: Limits = QUICK) -> ProgramResult:
    return run_program(program, "", limits)


# -- what both kinds bound ---------------------------------------------------


@each_sandbox
@pytest.mark.parametrize(
    ("program", "result"),
    [
        ("bytearray(2 * 2**30)", "MemoryError"),
        ("open('big', 'wb').write(bytes(32 * 2**20))", "error: OSError"),
        ("[open('/dev/null') for _ in range(100)]", "Too many open files"),
        ("print('kept')\n1 / 0", "kept\nerror: ZeroDivisionError"),
        ("while True: print('flood' * 1000)", "error: it wrote more than 16 MiB"),
        ("import sys\nwhile True: sys.stderr.write('flood' * 1000)", "wrote more than 16 MiB"),
        ("print(sum(map(int, input().split())))", "42\n"),
    ],
)
def test_a_program_does_not_get_beyond_its_limits(sandbox: str, program: str, result: str) -> None:
    outcome = run_program(program, "40 2", QUICK, sandbox)
    assert result in outcome.describe()
    assert len(outcome.stdout) <= QUICK.output_kb << 10


@each_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "import time; time.sleep(600)",
        "while True: pass",
        "import os, time; os.close(1); os.close(2); time.sleep(600)",
        "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(600)",
    ],
)
def test_a_program_that_does_not_end_is_ended(sandbox: str, program: str) -> None:
    outcome = run_program(program, "", Limits(time_s=1.0), sandbox)
    assert outcome.exit_code != 0
    assert sandbox == "weak" or "while" in program or outcome.problem


@each_sandbox
def test_an_output_of_a_program_that_reads_nothing_is_whole(sandbox: str) -> None:
    both = "import sys\nprint('o' * 60000)\nprint('e' * 60000, file=sys.stderr)"
    outcome = run_program(both, "x" * 2**20, QUICK, sandbox)
    assert (len(outcome.stdout), len(outcome.stderr)) == (60001, 60001)


# -- the cage ----------------------------------------------------------------


@needs_bubblewrap
def test_a_caged_program_sees_no_file_but_its_interpreter(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the key")
    targets = [
        "/etc/passwd", "/etc/shadow", "/proc", "/sys", "/home", "/var", "/run", "/usr/bin/env",
    ]  # fmt: skip
    targets += [str(secret), str(HERE), str(Path.home() / ".ssh"), f"/proc/{os.getpid()}/environ"]
    bound = (sys.prefix, sys.base_prefix)
    shown = [
        each for each in targets if not any(b.startswith(each) or each.startswith(b) for b in bound)
    ]
    outcome = attack(f"import os\nprint([p for p in {shown!r} if os.path.lexists(p)])")
    assert outcome.stdout == "[]\n"


@needs_bubblewrap
def test_a_caged_program_has_no_environment_and_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://user:password@host")
    outcome = attack("import os, socket\nprint(sorted(os.environ), socket.gethostname())")
    assert outcome.stdout == "['HOME', 'LC_CTYPE', 'PWD'] sandbox\n"


@needs_bubblewrap
@pytest.mark.parametrize(
    "escape",
    [
        "os.symlink('/etc/passwd', 'link'); open('link')",
        "os.symlink('/', 'link'); open('link/etc/passwd')", "open('../../../../etc/passwd')",
        "os.link(sys.executable, '/tmp/hard')", "open(os.__file__, 'a')",
        "open(os.path.join(sys.prefix, 'planted'), 'w')", "open('/planted', 'w')",
        "os.chmod(os.__file__, 0o777)", "os.mkdir('/dev/planted')", "os.chroot('/tmp')",
        "os.setuid(0)", "os.mknod('/tmp/disk', 0o60600, os.makedev(8, 0))",
        "os.memfd_create('hidden')", "open('/dev/mem')", "open('/dev/tty')",
    ],
)  # fmt: skip
def test_a_caged_program_cannot_leave_its_folder(escape: str) -> None:
    outcome = attack(f"import os, sys\ntry:\n    {escape}\nexcept OSError: print('refused')")
    assert outcome.stdout == "refused\n"
    assert not Path(sys.prefix, "planted").exists()


@needs_bubblewrap
@pytest.mark.parametrize(
    "fork",
    [
        "while True: os.fork()",
        "while True: os.posix_spawn(sys.executable, ['python', '-c', ''], {})",
        "subprocess.Popen([sys.executable, '-c', ''])",
        "os.forkpty()",
        "multiprocessing.get_context('fork').Process(target=print).start()",
    ],
)
def test_a_caged_program_is_one_process(fork: str) -> None:
    imports = "import multiprocessing, os, subprocess, sys"
    outcome = attack(f"{imports}\ntry:\n    {fork}\nexcept OSError: print('refused')")
    assert outcome.stdout == "refused\n"


@needs_bubblewrap
def test_threads_of_a_caged_program_share_its_memory_limit() -> None:
    grow = "kept = []\ndef grow():\n    while True: kept.append(bytearray(2**24))\n"
    threads = "import threading\nt = [threading.Thread(target=grow) for _ in range(8)]\n"
    waits = "for each in t: each.start()\nfor each in t: each.join()\nprint(len(kept) <= 16)"
    outcome = attack(grow + threads + waits, Limits(time_s=20.0, memory_mb=256))
    assert outcome.exit_code != 0 or outcome.stdout == "True\n"


@needs_bubblewrap
@pytest.mark.parametrize(
    "connect",
    [
        "socket.create_connection(('127.0.0.1', {port}), 5)",
        "socket.create_connection(('1.1.1.1', 53), 5)",
        "socket.socket(socket.AF_UNIX).connect('\\0' + {name!r})",
        "socket.socket(socket.AF_UNIX).connect({path!r})",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socket(40, socket.SOCK_STREAM)",  # AF_VSOCK: the hypervisor
    ],
)
def test_a_caged_program_has_no_sockets(connect: str) -> None:
    name = secrets.token_hex(8)
    with (
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
        socket.create_server(("127.0.0.1", 0)) as tcp,
    ):
        abstract.bind(f"\0{name}")
        abstract.listen()
        path = f"/tmp/{name}"
        named.bind(path)
        named.listen()
        try:
            line = connect.format(port=tcp.getsockname()[1], name=name, path=path)
            outcome = attack(f"import socket\ntry:\n    {line}\nexcept OSError: print('refused')")
        finally:
            Path(path).unlink()
    assert outcome.stdout == "refused\n"


@needs_bubblewrap
def test_a_caged_program_cannot_touch_its_parents() -> None:
    program = f"""
import ctypes, os, signal
for target in ({os.getpid()}, {os.getppid()}):
    try:
        os.kill(target, signal.SIGKILL)
    except ProcessLookupError:
        print("refused")
    print(ctypes.CDLL(None, use_errno=True).ptrace(16, target, 0, 0), ctypes.get_errno())
print(os.getppid() < 3, os.getuid())
"""
    outcome = attack(program)
    assert "refused\n" in outcome.stdout
    assert outcome.exit_code == 0


@needs_bubblewrap
def test_a_caged_program_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = "n = 0\ntry:\n    while True: n += open(f'f{n}', 'wb').write(bytes(2**20))\n"
    folders = ["/tmp", "/dev/shm"]
    for folder in folders:
        program = f"import os\nos.chdir({folder!r})\n{fill}except OSError: print(n >> 20)"
        assert int(attack(program).stdout) <= QUICK.disk_mb
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert attack("open('left', 'w'); print('done')").stdout == "done\n"
    assert list(tmp_path.iterdir()) == []


@needs_bubblewrap
def test_a_caged_program_inherits_no_open_file() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        os.set_inheritable(ours.fileno(), True)
        program = (
            "import os\nfound = []\nfor n in range(3, 64):\n    try: os.fstat(n); found.append(n)\n"
        )
        program += "    except OSError: pass\nprint(found)"
        assert attack(program).stdout == "[]\n"


@needs_bubblewrap
def test_a_caged_program_ends_with_its_worker() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c",
         "from producer_workers.user_code.sandbox import Limits\n"
         "from producer_workers.user_code.sandbox import run_program\n"
         "run_program('import time; time.sleep(600)', limits=Limits(time_s=600.0))"],
    )  # fmt: skip
    while not (caged := caged_of(worker.pid)):
        assert worker.poll() is None
        time.sleep(0.02)
    worker.kill()
    worker.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in caged):
        time.sleep(0.02)


def caged_of(worker: int) -> list[int]:
    """Return the processes below `worker`, once its program runs."""
    below = [worker]
    for pid in below:
        children = Path(f"/proc/{pid}/task/{pid}/children")
        below += [int(child) for child in children.read_text().split()] if children.exists() else []
    return below[1:] if len(below) == 4 else []


# -- where there is no cage --------------------------------------------------


def test_without_bubblewrap_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    bubblewrap.check_bubblewrap.cache_clear()
    monkeypatch.setattr("shutil.which", lambda name: None if name == "bwrap" else name)
    try:
        for use in (
            lambda: check_sandbox("bubblewrap"),
            lambda: run_program("print(1)"),
            lambda: load_judge("python_tests"),
        ):
            with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
                use()
    finally:
        bubblewrap.check_bubblewrap.cache_clear()
    check_sandbox("weak")
    with pytest.raises(ConfigError, match="not known"):
        check_sandbox("strong")


@needs_bubblewrap
def test_a_bubblewrap_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    bubblewrap.check_bubblewrap.cache_clear()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    try:
        with pytest.raises(SandboxUnavailable, match=r"fails here: .*/nowhere/python"):
            check_sandbox("bubblewrap")
    finally:
        bubblewrap.check_bubblewrap.cache_clear()


# -- a service ---------------------------------------------------------------


def ran(question: dict[str, Any]) -> dict[str, Any]:
    limits = Limits(question["run_timeout"], question["memory_limit_MB"])
    outcome = run_program(question["code"], question["stdin"], limits, "weak")
    result = {
        "status": "TimeLimitExceeded" if outcome.problem else "Finished",
        "execution_time": 0.1,
        "return_code": outcome.exit_code,
        "stdout": outcome.stdout,
        "stderr": outcome.stderr,
    }
    status = "Success" if outcome.exit_code == 0 else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": result,
            "executor_pod_name": None, "files": {}}  # fmt: skip


@contextmanager
def fusion(*faults: tuple[int, bytes]) -> Iterator[tuple[str, list[Any]]]:
    """Answer as SandboxFusion's server does: it runs the program, in the weak sandbox."""
    asked: list[Any] = []

    def answer(path: str, question: Any) -> tuple[int, bytes]:
        asked.append((path, question))
        is_fault = len(asked) <= len(faults)
        return faults[len(asked) - 1] if is_fault else (200, orjson.dumps(ran(question)))

    with http_service(answer) as url:
        yield url, asked


def test_a_service_runs_programs() -> None:
    busy = (503, b"")
    with fusion(busy) as (url, asked):
        assert run_program("print(input())", "given", QUICK, url).stdout == "given\n"
        assert asked[-1] == ("/run_code", {
            "code": "print(input())", "language": "python", "stdin": "given",
            "run_timeout": 20.0, "memory_limit_MB": 1024,
        })  # fmt: skip
        assert "ZeroDivisionError" in run_program("1 / 0", "", QUICK, f"{url}/run_code").describe()
        slow = run_program("while True: pass", "", Limits(time_s=0.5), url)
        assert slow.describe() == "error: the time limit was reached"
        score = python_tests(response="x = 1", ground_truth=["assert x == 1"], sandbox=url)
        assert score["score"] == 1.0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ((200, b'{"status": "SandboxError", "message": "no room"}'), "failed: no room"),
        ((200, b'{"status": "fine"}'), "answered"),
        ((200, b"[]"), "answered"),
        ((404, b"not here"), "refused with status 404: not here"),
    ],
)
def test_a_fault_of_a_service_is_no_score(fault: tuple[int, bytes], reason: str) -> None:
    with fusion(fault) as (url, _), pytest.raises(JudgeError, match=reason):
        python_tests(response="x = 1", ground_truth="assert x == 1", sandbox=url)


def test_an_output_too_long_to_read_is_the_fault_of_the_program() -> None:
    with fusion((200, b" " * (LONGEST_ANSWER + 1))) as (url, _):
        assert run_program("", "", QUICK, url).problem == "it wrote more than 1 MiB"


@needs_bubblewrap
def test_interpreter_below_tmp_is_seen() -> None:
    """A virtual environment there, as of CI jobs and notebooks."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        venv.create(folder, symlinks=True)
        program = (
            f"import sys; sys.path.insert(0, {str(HERE.parents[3])!r})\n"
            "from producer_workers.user_code.bubblewrap import check_bubblewrap\n"
            "check_bubblewrap()"
        )
        python = Path(folder) / "bin" / "python"
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
