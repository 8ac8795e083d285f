"""Serve the repository's Markdown files at their own paths, and reference pages: a hook of MkDocs.

Links between them hold on the site as they do in the repository, and `mkdocs build --strict` checks
them there.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.reference import REFERENCES

PAGES = (
    "*.md",
    "[a-z]*/README.md",
    "producer_workers/PROTOCOL.md",
    "proofs/chaos/*.md",
    "docs/pages/*.md",
    "docs/pages/*/*.md",
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
SEARCH = {
    "DECISIONS.md": {"exclude": True},
    "proofs/chaos/*": {"exclude": True},
    "CHANGELOG.md": {"boost": 0.1},
    "CONTRIBUTING.md": {"boost": 0.1},
    "docs/pages/api_*": {"boost": 0.002},
    "docs/pages/config_reference.md": {"boost": 0.8},
    "docs/pages/troubleshooting.md": {"boost": 2},
}
"""Pages that answer few questions, so that the search shows those that do first."""
KEYWORDS = {
    "README.md": ["install", "quick start"],
    "SECURITY.md": ["password", "TLS", "sandbox"],
    "docs/pages/browser.md": ["compare runs"],
    "docs/pages/concepts.md": [
        "staleness",
        "lease",
        "lineage",
        "dead letter",
        "quarantine",
        "manifest",
    ],
    "docs/pages/config_reference.md": ["settings", "learning rate"],
    "docs/pages/engines.md": ["tensor parallel", "colocated", "LoRA"],
    "docs/pages/first_gpu_run.md": ["presets"],
    "docs/pages/loss.md": ["PPO", "GRPO"],
    "docs/pages/many_gpus.md": ["multi-node training"],
    "docs/pages/metrics.md": [
        "entropy",
        "Weights & Biases",
        "wandb",
        "TensorBoard",
        "Prometheus",
        "Grafana",
    ],
    "docs/pages/moving.md": ["migrate"],
    "docs/pages/records.md": ["archive", "reproduce"],
    "docs/pages/servers.md": ["sentinel", "eviction", "rotate password"],
    "docs/pages/tools_and_agents.md": ["multi turn", "gateway"],
    "docs/pages/upgrading.md": ["upgrade"],
    "docs/pages/your_data_set.md": ["custom dataset"],
    "docs/pages/your_judge.md": ["reward function"],
    "docs/pages/your_trainer.md": ["own training loop"],
}
"""Words that people search for, and that a page does not use in a heading."""


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


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Tell the search about the page."""
    path = page.file.src_uri
    page.meta["search"] = next((how for name, how in SEARCH.items() if fnmatch(path, name)), {})
    page.meta["tags"] = KEYWORDS.get(path, [])
    return markdown
