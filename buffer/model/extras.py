"""Name the extra of this distribution that installs an optional package."""

from __future__ import annotations

import re
from importlib import metadata

from buffer.errors import ConfigError

EXTRAS = {
    "PIL": "images",
    "aiohttp": "http",
    "bitsandbytes": "bitsandbytes",
    "datasets": "datasets",
    "fakeredis": "testing",
    "huggingface_hub": "hub",
    "lupa": "testing",
    "math_verify": "math",
    "matplotlib": "train",
    "mcp": "mcp",
    "opentelemetry": "otel",
    "peft": "lora",
    "pyarrow": "parquet",
    "reasoning_gym": "gym",
    "safetensors": "train",
    "starlette": "web",
    "tensorboardX": "tensorboard",
    "torch": "train",
    "transformers": "train",
    "trl": "trl",
    "uvicorn": "web",
    "vllm": "vllm-cuda",
    "zstandard": "zstd",
}
"""Package, as it is imported, to extra."""


def missing_extra(error: ImportError) -> ConfigError | None:
    """Return the error to raise for a package of an extra; None for any other package."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in EXTRAS:
        return None
    return ConfigError(
        f"this needs the package {package}, which is not installed",
        hint=install_command(EXTRAS[package]),
    )


def install_command(extra: str) -> str:
    """Return the command that installs what an extra brings.

    It names the packages: the extra itself can be installed only from a checkout or a wheel.
    """
    # `aiohttp>=3.11; extra == "http"`
    named = re.compile(rf"(.+?)\s*;.*\bextra == [\"']{re.escape(extra)}[\"']")
    found = [named.fullmatch(line) for line in metadata.requires("rolloutmq") or ()]
    return " ".join(["pip install", *(f"'{match[1]}'" for match in found if match)])
