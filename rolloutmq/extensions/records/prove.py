"""Which prompts, judges and weights made a checkpoint, and whether all records are unaltered.

    trainer.json, state-*     compared with the *.sha256 beside them
    proof, in trainer.json    computed again from the manifests of the archive (`link`)
    groups of the archive     compared with their manifests (CRC-32) and the SHA-256 of the file
    terms/<digest>.json       config, versions and code; its name, which is in the chain, is its
                              SHA-256
    judges and other code     compared with the terms, where their files are here

It finds what has changed by accident or was edited. Somebody who computes all digests again is
found only by whoever has kept the proof of an earlier checkpoint.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from buffer.errors import RolloutMQError
from buffer.ledger.position import Position, link
from consumer.handle.checkpoint import DIGEST, POSITION, CheckpointFolder, digest_of
from rolloutmq.extensions.records.archive import Archive
from rolloutmq.launch.terms import FOLDER as TERMS
from rolloutmq.launch.terms import model_digest, source_digest
from rolloutmq.output import plural


class Check(NamedTuple):
    """What was compared; "note" where it cannot be here."""

    level: Literal["ok", "fault", "note"]
    what: str


@dataclass(slots=True)
class Proof:
    """The checks of a checkpoint, and what made it."""

    checks: list[Check] = field(default_factory=list)
    groups: Counter[str] = field(default_factory=Counter)
    """trained groups by data source, or by task where they have none"""
    touched: list[int] = field(default_factory=list)
    """steps that trained a group of the source that was asked for"""
    terms: dict[int, dict[str, Any]] = field(default_factory=dict)
    """what steps were trained under, by the first step of each"""
    head: str = ""

    @property
    def is_whole(self) -> bool:
        return all(check.level != "fault" for check in self.checks)


def prove(checkpoint: Path, archive: Archive, source: str | None = None) -> Proof:
    """Compare all records of a checkpoint. `source`: find the steps that touched it."""
    proof = Proof()
    position = _checkpoint(checkpoint, proof)
    if position is None:
        return proof
    proof.head = position.proof
    _chain(position, archive, proof, source)
    _terms(position, checkpoint.parents[1], archive, proof)
    return proof


def _checkpoint(folder: Path, proof: Proof) -> Position | None:
    files = sorted(file for file in folder.iterdir() if file.suffix != DIGEST and file.is_file())
    for file in files:
        beside = file.with_name(file.name + DIGEST)
        if not beside.exists():
            proof.checks.append(Check("note", f"{file.name} has no digest beside it"))
        elif beside.read_bytes() != f"{digest_of(file)}  {file.name}\n".encode():
            proof.checks.append(Check("fault", f"{file} does not have the digest in {beside.name}"))
        else:
            proof.checks.append(Check("ok", f"{file.name} is unaltered"))
    try:
        step = int(folder.name.rpartition("-")[2])
        return CheckpointFolder(folder.parent).read(step)
    except (RolloutMQError, ValueError) as error:
        proof.checks.append(Check("fault", f"{folder / POSITION} cannot be read: {error}"))
        return None


def _chain(position: Position, archive: Archive, proof: Proof, source: str | None) -> None:
    """Read all steps, and compare the head of their chain with that of the checkpoint."""
    head = ""
    found = {*archive.steps()}
    missing = [step for step in range(1, position.step + 1) if step not in found]
    for step in sorted(found):
        if step > position.step:
            break
        try:
            with archive.open(step) as file:
                file.check()
                head = link(head, position.terms_of(step), file.facts.manifest)
                sources = [group.shared.data_source or group.task for group in file.groups()]
        except RolloutMQError as error:
            proof.checks.append(Check("fault", error.message))
            missing.append(step)
            continue
        proof.groups.update(sources)
        if source in sources:
            proof.touched.append(step)
    if missing:
        what = f"{plural(len(missing), 'step')} of {position.step}, first {min(missing)}"
        proof.checks.append(Check("note", f"the archive lacks {what}: the chain is not compared"))
    elif head != position.proof:
        what = f"the manifests of steps 1 to {position.step}, or their terms, are others than "
        proof.checks.append(Check("fault", f"{what}those that were trained"))
    else:
        what = f"all {position.step} steps are those that were trained: proof {head[:16]}…"
        proof.checks.append(Check("ok", what))


def _terms(position: Position, run: Path, archive: Archive, proof: Proof) -> None:
    for first, digest in position.terms.items():
        name = f"{digest}.json"
        file = run / TERMS / name
        data = file.read_bytes() if file.exists() else archive.read(name)
        what = f"config and code from step {first} on"
        if data is None:
            proof.checks.append(Check("note", f"{what}: {TERMS}/{name} is not here"))
            continue
        if hashlib.sha256(data).hexdigest() != digest:
            proof.checks.append(Check("fault", f"{what}: {file} was altered"))
            continue
        terms = proof.terms[first] = orjson.loads(data)
        proof.checks.append(Check("ok", f"{what} are on record"))
        proof.checks += _code(terms)
        model = terms["config"]["policy"].get("model")
        if model and Path(model).is_dir():
            is_same = model_digest(Path(model)) == terms["model"]
            now = "are unaltered" if is_same else f"were altered: {model}"
            proof.checks.append(Check("ok" if is_same else "fault", f"the first weights {now}"))


def _code(terms: dict[str, Any]) -> Iterator[Check]:
    for name, digest in terms["code"].items():
        now = source_digest(name)
        if now is None:
            yield Check("note", f"the file of {name} is not here")
        elif now != digest:
            yield Check("fault", f"the file of {name} is another one than in training")
        else:
            yield Check("ok", f"the file of {name} is unaltered")


def judges_of(terms: dict[str, Any]) -> Sequence[str]:
    """Return the judges of all training tasks."""
    tasks = terms["config"]["tasks"].values()
    return sorted({str(task.get("judge")) for task in tasks if not task.get("eval_of")})
