"""Serve the repository's Markdown files at their own paths, and reference pages: a hook of MkDocs.

Links between them hold on the site as they do in the repository, and `mkdocs build --strict` checks
them there.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from docs.reference import REFERENCES

PAGES = (
    "*.md",
    "[a-z]*/README.md",
    "producer_workers/PROTOCOL.md",
    "tests/chaos/*.md",
    "docs/pages/*.md",
)
LINKED = (
    "LICENSE",
    "docker/redis.conf",
    "docs/pages/*.png",
    "docs/pages/*.svg",
    "docs/pages/*.css",
    "docs/pages/*.js",
    "benchmarks/**/*.png",
)
"""What pages show or link to."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the theme's own files, and all pages with paths from the root of the repository."""
    root = Path(config.config_file_path).resolve().parents[1]
    found = sorted({path for pattern in (*PAGES, *LINKED) for path in root.glob(pattern)})
    theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files(
        [
            *theme,
            *(File(str(p.relative_to(root)), str(root), config.site_dir, False) for p in found),
            *(File.generated(config, path, content=page()) for path, page in REFERENCES.items()),
        ]
    )
