"""A Hugging Face Hub on this machine: the requests that `huggingface_hub` makes to download files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

Files = dict[str, bytes]


@dataclass
class FakeHub:
    """Repositories by name (OWNER/NAME, datasets/OWNER/NAME), each with the files of its commits."""

    commits: dict[str, dict[str, Files]] = field(default_factory=dict)
    refs: dict[str, dict[str, str]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    url: str = ""
    asked: list[str] = field(default_factory=list)

    def push(self, name: str, files: Files, *refs: str) -> str:
        """Add a commit, the newest of main and of `refs`; return it."""
        content = json.dumps([name, sorted((path, _oid(data)) for path, data in files.items())])
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.commits.setdefault(name, {})[commit] = files
        self.refs.setdefault(name, {}).update(dict.fromkeys(("main", *refs), commit))
        return commit

    def push_folder(self, name: str, folder: Path, **more: bytes) -> str:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        return self.push(name, files | more)

    def env(self, home: Path) -> dict[str, str]:
        """Return the environment of a machine with the cache `home`, on this Hub's network."""
        return {
            "HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "0",
        }  # fmt: skip

    def use(self, patch: pytest.MonkeyPatch, home: Path) -> None:
        """Make this process such a machine: the variables are read when the package is imported."""
        from huggingface_hub import constants

        patch.setattr(constants, "ENDPOINT", self.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", _TEMPLATE.format(self.url))
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)


_TEMPLATE = "{}/{{repo_id}}/resolve/{{revision}}/{{filename}}"


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(_Handler):
        files = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.files.asked.append(path)
        if path.startswith("api/"):
            self._api(path.removeprefix("api/").removeprefix("models/"))
        else:
            name, _, rest = path.partition("/resolve/")
            revision, _, file = rest.partition("/")
            if commit := self._commit(name, revision):
                self._send_file(commit, self.files.commits[name][commit].get(file))

    def _api(self, path: str) -> None:
        kind = "/tree/" if "/tree/" in path else "/revision/"
        name, _, revision = path.partition(kind)
        commit = self._commit(name, revision)
        if commit is None:
            return
        found = self.files.commits[name][commit]
        tree = [
            {"type": "file", "path": file, "size": len(data), "oid": _oid(data)}
            for file, data in found.items()
        ]
        siblings = [{"rfilename": file} for file in found]
        info = {"id": name.removeprefix("datasets/"), "sha": commit, "siblings": siblings}
        self._send(200, json.dumps(tree if kind == "/tree/" else info).encode())

    def _commit(self, name: str, revision: str) -> str | None:
        """Return the commit; None after refusing the request."""
        hub = self.files
        commit = hub.refs.get(name, {}).get(revision, revision)
        if name in hub.gated:
            self._refuse(403, "GatedRepo")
        elif name not in hub.commits:
            self._refuse(401, "RepoNotFound")
        elif commit not in hub.commits[name]:
            self._refuse(404, "RevisionNotFound")
        else:
            return commit
        return None

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send_file(self, commit: str, data: bytes | None) -> None:
        if data is None:
            self._refuse(404, "EntryNotFound")
        else:
            self._send(200, data, {"X-Repo-Commit": commit, "ETag": f'"{_oid(data)}"'})

    def _send(self, status: int, body: bytes, headers: dict[str, Any] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
