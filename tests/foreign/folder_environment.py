"""An environment of Harbor for tests: a folder for each trial, whose commands run in bubblewrap.

It is loaded by Harbor's interpreter, and knows nothing of this project. A command sees the system
read-only, and the folder's /app, /logs, /tests, /solution, /tmp and /root.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

ROOT = Path(os.environ.get("FOLDER_ENVIRONMENTS", "/tmp/folder-environments"))

OWN = ("app", "logs", "tests", "solution", "tmp", "root", "opt", "installed-agent")
SYSTEM = ("usr", "bin", "lib", "lib64", "sbin", "etc")


class FolderEnvironment(BaseEnvironment):
    """Keeps its files in ROOT/<session id>; the tmux server in it outlives a command."""

    @staticmethod
    def type() -> str:
        return "folder"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    def _validate_definition(self) -> None: ...

    @property
    def _folder(self) -> Path:
        return ROOT / self.session_id

    def _path(self, inside: str) -> Path:
        return self._folder / inside.lstrip("/")

    async def start(self, force_build: bool) -> None:
        for name in OWN:
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        await self.ensure_dirs(self._mount_targets())
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        if self._folder.is_dir():
            await self.exec("tmux kill-server")
            shutil.rmtree(self._folder)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self._path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._path(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._path(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self._path(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._path(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        process = await asyncio.create_subprocess_exec(
            *self._bubblewrap(cwd or "/app", self._merge_env(env) or {}),
            *("bash", "-c", command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(timeout_sec):
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        return ExecResult(
            stdout=out.decode(), stderr=err.decode(), return_code=process.returncode or 0
        )

    def _bubblewrap(self, cwd: str, env: dict[str, Any]) -> list[str]:
        command = ["bwrap", "--tmpfs", "/", "--proc", "/proc", "--dev", "/dev"]
        for name in SYSTEM:
            command += ["--ro-bind-try", f"/{name}", f"/{name}"]
        for name in OWN:
            command += ["--bind", str(self._folder / name), f"/{name}"]
        known = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "TERM": "xterm"}
        command += ["--clearenv", "--chdir", cwd]
        for name, value in {**known, **env}.items():
            command += ["--setenv", name, str(value)]
        return command
