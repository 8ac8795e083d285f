"""Repositories of the Hugging Face Hub. A folder of its cache is named after the commit."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

from buffer.config.run_settings import PolicySection
from buffer.errors import HubError
from buffer.imports import import_extra

log = logging.getLogger("rolloutmq.hub")

MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Repository(NamedTuple):
    """A repository of the Hub at a branch, tag or commit; None: not decided yet."""

    id: str
    kind: Literal["model", "dataset"]
    revision: str | None = None

    @property
    def name(self) -> str:
        return self.id if self.kind == "model" else f"datasets/{self.id}"

    @property
    def pin(self) -> str | None:
        """Return NAME@COMMIT; None if the revision is not a commit."""
        is_commit = _COMMIT.fullmatch(self.revision or "")
        return f"{self.name}@{self.revision}" if is_commit else None

    def download(self) -> Path:
        """Return the folder of the files after downloading missing ones. Raises HubError."""
        return self._snapshot(is_local=False)

    def folder(self) -> Path:
        """Return the folder of the files in the cache, without the network. Raises HubError."""
        return self._snapshot(is_local=True)

    def _snapshot(self, *, is_local: bool) -> Path:
        user = "a model or a data set of the Hub"
        hub = import_extra("huggingface_hub", user)
        for module in ("errors", "utils"):
            import_extra(f"huggingface_hub.{module}", user)
        if not sys.stderr.isatty():
            hub.utils.disable_progress_bars()
        is_model = self.kind == "model"
        what = f"{self.kind} {self.id}"
        try:
            return Path(
                hub.snapshot_download(
                    self.id,
                    repo_type=self.kind,
                    revision=self.revision,
                    local_files_only=is_local,
                    allow_patterns=MODEL_FILES if is_model else None,
                    # copies of the weights, which are not read
                    ignore_patterns=["*/*", "consolidated*"] if is_model else None,
                )
            )
        except hub.errors.GatedRepoError as error:
            raise HubError(
                f"{what} is gated, and this user has no access to it",
                hint=f"accept its conditions on {hub.constants.ENDPOINT}/{self.name}, then run "
                "`hf auth login` or set HF_TOKEN",
            ) from error
        except hub.errors.RepositoryNotFoundError as error:
            raise HubError(
                f"there is no folder {self.id} here, and no {what} on the Hub, or it is private",
                hint="correct the id or the path; for a private one, run `hf auth login` or set "
                "HF_TOKEN",
            ) from error
        except hub.errors.RevisionNotFoundError as error:
            raise HubError(
                f"{what} has no revision {self.revision}",
                hint="set revision to a branch, a tag or a commit of it",
            ) from error
        except hub.errors.LocalEntryNotFoundError as error:
            raise self._absent(hub) from error
        except (hub.errors.HfHubHTTPError, OSError) as error:  # a full disk, a broken connection
            raise HubError(
                f"{what} cannot be downloaded: {error}",
                hint="start again: it continues with the files that are missing",
            ) from error

    def _absent(self, hub: Any) -> HubError:
        cache = hub.constants.HF_HUB_CACHE
        offline = hub.constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else f"{hub.constants.ENDPOINT} is not reachable"
        at = f" at {self.revision}" if self.revision else ""
        return HubError(
            f"there is no folder {self.id} here, the cache {cache} lacks files of {self.kind} "
            f"{self.id}{at}, and {why}",
            hint=f"on a machine with a network, run `{self.command}`, and copy "
            f"{hub.file_download.repo_folder_name(repo_id=self.id, repo_type=self.kind)} from its "
            f"cache to {cache}",
        )

    @property
    def command(self) -> str:
        """Return the shell command that downloads the files."""
        kind = "" if self.kind == "model" else " --repo-type dataset"
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.id}{kind}{revision}"


def repository(
    path: Path | None, revision: str | None, kind: Literal["model", "dataset"]
) -> Repository | None:
    """Return the repository OWNER/NAME; None for an existing folder without a revision."""
    if path is None or not is_id(path) or (revision is None and path.exists()):
        return None
    return Repository(str(path), kind, revision)


def model_repository(policy: PolicySection) -> Repository | None:
    """Return the repository of the run's first model; None for a folder."""
    return repository(policy.model, policy.revision, "model")


def is_id(path: Path) -> bool:
    return _ID.fullmatch(str(path)) is not None
