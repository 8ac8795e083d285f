"""Load the functions and classes that a config names, and say which package is missing."""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from buffer.errors import ConfigError, describe

_LIBRARIES = ("<", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""Beginnings of the names of files that are no code of a user."""


def is_dotted_path(text: str) -> bool:
    """Return whether `text` has the form package.module:name."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), name])


def check_module(spec: str, *, kind: str) -> None:
    """Raise ConfigError if a slow module is missing, importing only the packages around it."""
    module_name = spec.partition(":")[0]
    search_in(Path.cwd())
    if not is_there(module_name):
        raise _not_importable(spec, kind, module_name, f"No module named {module_name!r}")


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it
        return False


def load_function(
    spec: str, *, kind: str, built_in: Mapping[str, str] = MappingProxyType({})
) -> Callable[..., Any]:
    """Return the function at "package.module:name", or a `built_in` name. Raises ConfigError."""
    function: Callable[..., Any] = load_object(
        built_in.get(spec, spec), kind=kind, built_in=built_in
    )
    if not callable(function):
        raise ConfigError(f"{kind} {spec!r} is not a function", hint='give "module:function"')
    return function


def load_object(spec: str, *, kind: str, built_in: Iterable[str] = ()) -> Any:
    """Return the object at "package.module:name". Raises ConfigError, which suggests `built_in`.

    The current folder is searched last, so that a file there hides no installed module.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        known = ", ".join(sorted(built_in))
        raise ConfigError(
            f"there is no {kind} {spec!r}", hint=f'known: {known}; or give "module:name"'
        )
    search_in(Path.cwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        if missing := missing_extra(error):
            raise missing from error
        raise _not_importable(spec, kind, module_name, str(error)) from error
    except KeyboardInterrupt:
        raise
    # the user's code may raise anything, and a module may call sys.exit
    except BaseException as error:
        message = f"{kind} {spec!r}: {describe(error)} while {module_name!r} was imported"
        raise ConfigError(message, hint=_last_line(error)) from error
    if not hasattr(module, name):
        raise ConfigError(
            f"{kind} {spec!r}: module {module_name!r} has no {name!r}",
            hint=_hidden(module_name) or f"the module is {_origin(module)}",
        )
    return getattr(module, name)


@cache
def attached(group: str) -> Mapping[str, str]:
    """Return what installed packages attach by the entry points of a group: name to module:name.

    Raises ConfigError where two packages attach a name.
    """
    # here: it takes 20 ms, and reading the files of all packages 50 ms
    from importlib import metadata

    found: dict[str, str] = {}
    for point in metadata.entry_points(group=group):
        if found.setdefault(point.name, point.value) != point.value:
            raise ConfigError(
                f"two packages attach {point.name!r} to {group}: {found[point.name]} and "
                f"{point.value}",
                hint="uninstall one of them",
            )
    return MappingProxyType(found)


def _origin(module: ModuleType) -> str:
    """Return the file of a module, or the folder of one that has no file."""
    folders: Iterable[str] = getattr(module, "__path__", ["built in"])
    return getattr(module, "__file__", None) or next(iter(folders))


def _not_importable(spec: str, kind: str, module_name: str, reason: str) -> ConfigError:
    hint = _hidden(module_name) or "add its folder to PYTHONPATH, or put the file beside the config"
    return ConfigError(
        f"{kind} {spec!r}: module {module_name!r} cannot be imported: {reason}", hint=hint
    )


def _hidden(module_name: str) -> str:
    """Return which module hides the user's one of the same name; "" if none does."""
    top = module_name.partition(".")[0]
    if top not in sys.modules:
        return ""
    origin = Path(_origin(sys.modules[top])).resolve()
    files = [Path(folder, f"{top}.py") for folder in sys.path]
    hidden = next((file for file in files if file.is_file() and file.resolve() != origin), None)
    return f"{hidden} is hidden by {origin}, which has its name: rename it" if hidden else ""


def _last_line(error: BaseException) -> str:
    """Return where an error was raised, if possible in no library: "see line 3 of my_judge.py"."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"see line {error.lineno} of {error.filename}"
    frames = traceback.extract_tb(error.__traceback__)
    # the first is that of load_object
    users = [each for each in frames[1:] if not each.filename.startswith(_LIBRARIES)]
    frame = (users or frames)[-1]
    return f"see line {frame.lineno} of {frame.filename}"


def search_in(folder: Path) -> None:
    name = str(folder.resolve())
    if name not in sys.path:
        sys.path.append(name)


# package, as it is imported, to extra
EXTRAS = {
    "PIL": "images",
    "aiohttp": "http",
    "bitsandbytes": "bitsandbytes",
    "datasets": "datasets",
    "fakeredis": "testing",
    "huggingface_hub": "hub",
    "lupa": "testing",
    "math_verify": "math",
    "mcp": "mcp",
    "obstore": "bucket",
    "opentelemetry": "otel",
    "peft": "lora",
    "pyarrow": "parquet",
    "pynvml": "vllm-cuda",
    "reasoning_gym": "gym",
    "safetensors": "train",
    "starlette": "web",
    "tensorboardX": "tensorboard",
    "tokenizers": "train",
    "torch": "train",
    "transformers": "train",
    "trl": "trl",
    "uvicorn": "web",
    "vllm": "vllm-cuda",
    "wandb": "wandb",
    "zstandard": "zstd",
}


def missing_extra(error: ImportError) -> ConfigError | None:
    """Return the error to raise for a package of an extra; None for any other package."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in EXTRAS:
        return None
    return _needs_extra("this", package)


def import_extra(module: str, what: str) -> Any:
    """Import a module of an extra, which `what` needs. Raises ConfigError, which names it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _needs_extra(what, module.partition(".")[0]) from error


def _needs_extra(what: str, package: str) -> ConfigError:
    return ConfigError(
        f"{what} needs the package {package}, which is not installed",
        hint=install_command(EXTRAS[package]),
    )


def import_package(module: str, requirement: str) -> Any:
    """Import a module of a package that no extra installs. Raises ConfigError, which names it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _needs(requirement, f": {error}") from error


def require(module: str, requirement: str) -> None:
    """Raise ConfigError if a module is missing, without importing it."""
    if not is_there(module):
        raise _needs(requirement)


def _needs(requirement: str, why: str = "") -> ConfigError:
    return ConfigError(f"this needs {requirement}{why}", hint=f"pip install '{requirement}'")


def install_command(extra: str) -> str:
    """Return the command that installs an extra's packages, without a checkout or wheel."""
    # here, because it would add a fifth to the time of --help
    from importlib import metadata

    # `aiohttp>=3.11; extra == "http"`
    named = re.compile(rf"(.+?)\s*;.*\bextra == [\"']{re.escape(extra)}[\"']")
    found = [named.fullmatch(line) for line in metadata.requires("rolloutmq") or ()]
    return " ".join(["pip install", *(f"'{match[1]}'" for match in found if match)])
