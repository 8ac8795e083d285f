"""Name the extra of this distribution that installs an optional package."""

from __future__ import annotations

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
        hint=f"pip install 'rolloutmq[{EXTRAS[package]}]'",
    )
