"""The sample log: what some groups of each train step said, in `samples/` of the run's folder.

samples/000001-step-00000001.jsonl.gz     written by one trainer, from this step on
samples/000003-step-00000081.jsonl.gz     a trainer that continued from the checkpoint of 80

A file has a gzip member per step: its groups, one JSON object per line (`describe_sample`). Each
trainer creates its own file, which replaces its first step and all later ones of older files. If a
trainer dies while it writes, readers skip the incomplete member.
"""

from __future__ import annotations

import gzip
import logging
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from buffer.wire.group_json import group_json
from consumer.handle.sample_tokens import FIELD, Packed, pack_group, unpack, without_tokens
from consumer.handle.step_log import read_steps

log = logging.getLogger("rolloutmq.samples")

FOLDER = "samples"
_NAME = re.compile(r"(\d{6,})-step-(\d{8,})\.jsonl\.gz")
_START = b'{"step":'

AROUND = 60  # characters of an excerpt on each side of the match

Sample = dict[str, Any]  # one group as `describe_sample` returns it


class SampleFile(NamedTuple):
    """One file of the log: `number` counts them in the order of their creation."""

    number: int
    first: int
    path: Path

    @classmethod
    def named(cls, run_dir: Path, number: int, first: int) -> SampleFile:
        return cls(number, first, run_dir / FOLDER / f"{number:06d}-step-{first:08d}.jsonl.gz")


def sample_files(run_dir: Path) -> list[SampleFile]:
    folder = run_dir / FOLDER
    names = [(path, _NAME.fullmatch(path.name)) for path in folder.glob("*.jsonl.gz")]
    return sorted(SampleFile(int(name[1]), int(name[2]), path) for path, name in names if name)


class SampleLog:
    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def steps(self) -> tuple[int, int] | None:
        """Return the first and the last step of the log; None if it is empty."""
        files = sample_files(self._run_dir)
        ends = (max(map(_step_of, _lines(file)), default=0) for file in reversed(files))
        last = next(filter(None, ends), None)
        return (min(file.first for file in files), last) if last else None

    def read(self, step: int, *, tokens: bool = False) -> list[Sample]:
        """Return the samples of a step in the order of their choice; [] if none are logged.

        `tokens`: with their numbers by token, as `group_json` names them.
        """
        files = [file for file in sample_files(self._run_dir) if file.first <= step]
        lines = _lines(files[-1], step + 1) if files else ()
        shown = unpack if tokens else without_tokens
        return [shown(orjson.loads(line)) for line in lines if _step_of(line) == step]

    def search(self, text: str, why: str = "") -> Iterator[Sample]:
        """Yield the samples that contain a text in any case, and were chosen for `why`.

        Newest steps come first.
        """
        end = math.inf
        # parsing a line costs far more than searching its bytes
        is_plain = text.isascii() and text.isprintable() and not set(text) & set('"\\')
        raw = text.lower().encode() if is_plain else b""
        for file in reversed(sample_files(self._run_dir)):
            samples = [orjson.loads(line) for line in _lines(file, end) if raw in line.lower()]
            for sample in reversed(samples):
                if why in ("", sample.get("why")) and (not text or contains(sample, text)):
                    yield without_tokens(sample)
            end = min(end, file.first)

    def find(self, gid: str, *, tokens: bool = False) -> Sample | None:
        """Return the sample of a group that was trained; None where it is not in the log."""
        steps = read_steps(self._run_dir)
        trained = (step.step for step in reversed(steps) if gid in step.gids)
        samples = self.read(next(trained, 0), tokens=tokens)
        return next((sample for sample in samples if sample["gid"] == gid), None)


def _step_of(line: bytes) -> int:
    return int(line[len(_START) : line.index(b",")])


def _lines(file: SampleFile, end: float = math.inf) -> Iterator[bytes]:
    """Yield the lines of steps before `end`, up to where a file is damaged or incomplete."""
    try:
        with gzip.open(file.path, "rb") as content:
            for line in content:
                if not line.startswith(_START):
                    raise EOFError("it contains something else")
                if _step_of(line) >= end:  # steps ascend
                    return
                yield line
    except FileNotFoundError:  # the trainer has just deleted it, as the oldest
        return
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        log.warning("%s is incomplete: what follows is passed over: %s", file.path, error)


def describe_sample(
    group: RolloutGroup,
    step: int,
    why: str,
    staleness: int | None,
    texts: TokenTexts,
    *,
    tokens: int = 0,
    scores: Sequence[Packed] = (),
) -> Sample:
    """Return a group as a line of the log: the JSON of `show --json`, without tokens.

    `tokens`: of each rollout, how many have their numbers in it (`sample_tokens.py`); `scores`:
    those of the trainer, of each rollout.

    `why` it was chosen: best, worst, truncated or random. `texts` decodes what the group does not
    have as text: a prompt without messages (`prompt`), and a rollout's runs of tokens that were
    sampled or not (`turns` of the member).
    """
    sample: Sample = {"step": step, "why": why, "gid": group.gid, "task": group.task}
    sample["staleness"] = staleness
    sample |= group_json(group, tokens=False)
    add_texts(sample, group, texts)
    if tokens:
        for place, packed in enumerate(pack_group(group, tokens)):
            sample["members"][place][FIELD] = packed | (scores[place] if scores else {})
    return sample


def contains(document: dict[str, Any], text: str) -> str:
    """Return a group's text around a match in any case; "" without one."""
    said = [document.get("prompt") or ""]
    said += [str(message.get("content", "")) for message in document.get("messages", [])]
    for member in document["members"]:
        said += [turn["text"] for turn in member.get("turns") or [{"text": member["response"]}]]
    wanted = text.casefold()
    for part in said:
        at = part.casefold().find(wanted)
        if at >= 0:
            return part[max(0, at - AROUND) : at + len(text) + AROUND]
    return ""


def add_texts(document: dict[str, Any], group: RolloutGroup, texts: TokenTexts) -> None:
    """Add the texts that the group does not carry to its document (`group_json`)."""
    if not group.shared.messages:
        document["prompt"] = texts.joined(group.prompt_ids.tolist())
    for member, rollout in zip(document["members"], group.states, strict=True):
        ids = rollout.response_ids.tolist()
        if ids and not member["response"]:
            member["response"] = texts.joined(ids, skip_special_tokens=True) or ""
        if rollout.response_mask is not None:
            member["turns"] = _turns(ids, rollout.response_mask.tolist(), texts)


def _turns(ids: list[int], mask: list[int], texts: TokenTexts) -> list[dict[str, Any]] | None:
    """Return the runs of tokens that were trained or not; None for one run, or no tokenizer."""
    starts = [n for n in range(len(mask)) if n == 0 or mask[n] != mask[n - 1]]
    if len(starts) < 2 or texts.joined([]) is None:
        return None
    ends = [*starts[1:], len(ids)]
    return [
        {"trained": bool(mask[start]), "tokens": end - start, "text": texts.joined(ids[start:end])}
        for start, end in zip(starts, ends, strict=True)
    ]


class TokenTexts:
    """Decodes tokens with the first tokenizer that is found in `folders`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._files = [folder / "tokenizer.json" for folder in folders]

    @cached_property
    def _tokenizer(self) -> Any:
        file = next((path for path in self._files if path.is_file()), None)
        if file is None:
            return None
        try:
            from tokenizers import Tokenizer
        except ImportError:  # installed with an extra
            return None
        return Tokenizer.from_file(str(file))

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return [str(self._tokenizer.decode([token], skip_special_tokens=False)) for token in ids]

    def joined(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str | None:
        if self._tokenizer is None:
            return None
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


def model_folders(run: Run, run_dir: Path | None) -> list[Path]:
    newest = run.control.state().weights_path
    return [*([run_dir / "model"] if run_dir else []), *([Path(newest)] if newest else [])]
