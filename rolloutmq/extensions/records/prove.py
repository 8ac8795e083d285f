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
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from rich.text import Text
from typer import Argument, Exit, Option

from buffer.errors import ConfigError, ModelError, RolloutMQError
from buffer.ledger.position import Position, link
from consumer.handle.checkpoint import DIGEST, CheckpointFolder, digest_of
from rolloutmq.command_list import command
from rolloutmq.extensions.records.archive import Archive, ArchivePlace
from rolloutmq.extensions.records.step_file import RecordDamaged
from rolloutmq.launch.terms import FOLDER as TERMS
from rolloutmq.launch.terms import model_digest, source_digest
from rolloutmq.options import AsJson, Output
from rolloutmq.output import count, plural
from rolloutmq.views.explain.symptom import marked

Level = Literal["ok", "fault", "note"]


@command("prove", epilog="Example: rolloutmq prove runs/demo/checkpoints/step-000120")
def prove_checkpoint(
    checkpoint: Annotated[Path, Argument(metavar="CHECKPOINT", help="Folder of a checkpoint.")],
    archive: ArchivePlace = None,
    without: Annotated[
        str | None,
        Option("--without-source", metavar="SOURCE", help="Name the steps that touched it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell which prompts, judges and weights made a checkpoint, and whether all is unaltered.

    Compares the checkpoint's files, the chain of trained batches, every group in the archive, the
    config and the user's code. Ends with code 6 if something was altered, and with --without-source
    if a step touched it.
    """
    folder = checkpoint.resolve()
    if not (folder.is_dir() and re.fullmatch(r"step-\d+", folder.name)):
        hint = "give a folder in checkpoints/, such as runs/demo/checkpoints/step-000120"
        raise ConfigError(f"{checkpoint} is no folder of a checkpoint", hint=hint)
    proof = prove(folder, Archive(archive or folder.parents[1] / "archive"), without)
    document: dict[str, Any] = {
        "whole": proof.is_whole, "proof": proof.head, "groups": dict(proof.groups),
        "judges": sorted(proof.judges), "steps_with_source": proof.touched if without else None,
        "checks": [{"level": level, "what": what} for level, what in proof.checks],
    }  # fmt: skip
    shown = [marked(level, what) for level, what in proof.checks]
    made = ", ".join(f"{name} {count(number)}" for name, number in proof.groups.most_common())
    shown.append(Text(f"trained groups: {made or 'none'}; judges: {', '.join(document['judges'])}"))
    if without:
        steps = ", ".join(map(str, proof.touched)) or "none"
        shown.append(Text(f"steps that trained groups of {without}: {steps}"))
    Output(document, shown).print(as_json=as_json)
    if not proof.is_whole or proof.touched:
        raise Exit(RecordDamaged.exit_code)


@dataclass(slots=True)
class Proof:
    """The checks of a checkpoint, and what made it."""

    checks: list[tuple[Level, str]] = field(default_factory=list)
    """what was compared; "note" where it cannot be here"""
    groups: Counter[str] = field(default_factory=Counter)
    """trained groups by data source, or by task where they have none"""
    judges: set[str] = field(default_factory=set)
    """of all training tasks"""
    touched: list[int] = field(default_factory=list)
    """steps that trained a group of the source that was asked for"""
    head: str = ""

    @property
    def is_whole(self) -> bool:
        return all(level != "fault" for level, _ in self.checks)

    def add(self, level: Level, what: str) -> None:
        self.checks.append((level, what))


def prove(checkpoint: Path, archive: Archive, source: str | None = None) -> Proof:
    """Compare all records of a checkpoint. `source`: find the steps that touched it."""
    proof = Proof()
    for file in sorted(path for path in checkpoint.iterdir() if path.is_file()):
        if file.suffix == DIGEST:
            continue
        beside = file.with_name(file.name + DIGEST)
        if not beside.exists():
            proof.add("note", f"{file.name} has no digest beside it")
        elif beside.read_bytes() != f"{digest_of(file)}  {file.name}\n".encode():
            proof.add("fault", f"{file} does not have the digest in {beside.name}")
        else:
            proof.add("ok", f"{file.name} is unaltered")
    try:
        position = CheckpointFolder(checkpoint.parent).read(int(checkpoint.name[len("step-") :]))
    except ModelError as error:
        proof.add("fault", error.message)
        return proof
    proof.head = position.proof
    _compare_chain(position, archive, proof, source)
    _compare_terms(position, checkpoint.parents[1], archive, proof)
    return proof


def _compare_chain(position: Position, archive: Archive, proof: Proof, source: str | None) -> None:
    """Read all steps, and compare the head of their chain with that of the checkpoint."""
    head, there, missing = "", {*archive.steps()}, list[int]()
    for step in range(1, position.step + 1):
        if step not in there:
            missing.append(step)
            continue
        try:
            file = archive.open(step)
            file.check()
            head = link(head, position.terms_of(step), file.facts.manifest)
            sources = [group.shared.data_source or group.task for group in file.groups()]
        except RolloutMQError as error:
            proof.add("fault", error.message)
            missing.append(step)
            continue
        proof.groups.update(sources)
        if source in sources:
            proof.touched.append(step)
    if missing:
        what = f"{plural(len(missing), 'step')} of {position.step}, first {missing[0]}"
        proof.add("note", f"the archive lacks {what}: the chain is not compared")
    elif head == position.proof:
        what = f"all {position.step} steps are those that were trained: proof {head[:16]}…"
        proof.add("ok", what)
    else:
        what = f"the manifests of steps 1 to {position.step}, or their terms, are others than "
        proof.add("fault", f"{what}those that were trained")


def _compare_terms(position: Position, run: Path, archive: Archive, proof: Proof) -> None:
    for first, digest in position.terms.items():
        name = f"{digest}.json"
        file, copy = run / TERMS / name, archive.read(name)
        copies = {} if copy is None else {f"{archive.place}/{name}": copy}
        copies |= {str(file): file.read_bytes()} if file.exists() else {}
        altered = [n for n, data in copies.items() if hashlib.sha256(data).hexdigest() != digest]
        what = f"config and code from step {first} on"
        if altered or not copies:
            found = f"altered: {', '.join(altered)}" if altered else f"{TERMS}/{name} is not here"
            proof.add("fault" if altered else "note", f"{what}: {found}")
            continue
        proof.add("ok", f"{what} are on record")
        terms: dict[str, Any] = orjson.loads(next(iter(copies.values())))
        tasks = terms["config"]["tasks"].values()
        proof.judges |= {str(task.get("judge")) for task in tasks if not task.get("eval_of")}
        for function, source in terms["code"].items():
            now = source_digest(function)
            if now is None:
                proof.add("note", f"the file of {function} is not here")
            elif now == source:
                proof.add("ok", f"the file of {function} is unaltered")
            else:
                proof.add("fault", f"the file of {function} is another one than in training")
        model = Path(terms["config"]["policy"].get("model") or run / "model")
        if not model.is_dir():
            proof.add("note", f"the first weights are not here: {model}")
        elif model_digest(model) == terms["model"]:
            proof.add("ok", "the first weights are unaltered")
        else:
            proof.add("fault", f"the first weights were altered: {model}")
