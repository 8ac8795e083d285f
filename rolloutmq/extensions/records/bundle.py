"""One step as a file that anybody can train again: a zip archive of a small run folder.

    archive/step-0000041.rmq      the batch, config and versions
    checkpoints/step-000040/      the state before it
    model/                        the first weights and the tokenizer
    policy/                       in place of both: what forward passes returned (--logprobs)
    steps.jsonl                   the line of the step: loss, norms, rewards
    terms/                        what it was trained under

A bundle comes from somebody else: only files of these names are read, no code in it is imported,
and weights are safetensors.
"""

from __future__ import annotations

import re
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated

from rich.text import Text
from typer import Argument, Option

from buffer.errors import ConfigError
from buffer.imports import is_dotted_path
from consumer.handle.step_log import STEPS_FILE
from rolloutmq.command_list import command
from rolloutmq.extensions.records.archive import Archive, ArchivePlace, archive_of
from rolloutmq.extensions.records.folders import checkpoint_of, choose_parent, log_lines
from rolloutmq.extensions.records.step_file import RecordDamaged, config_of
from rolloutmq.launch.terms import FOLDER as TERMS
from rolloutmq.options import AsJson, Output, RunDir
from rolloutmq.views.explain.symptom import marked

MOST_BYTES = 4 << 30
"""Of all files of a bundle that is read."""

_NAMES = re.compile(
    r"archive/step-\d{7,}\.rmq|archive/[0-9a-f]{64}\.json|terms/[0-9a-f]{64}\.json|steps\.jsonl|"
    r"checkpoints/step-\d{6,}/[\w.-]+\.(json|safetensors|sha256)|"
    r"model/[\w.-]+\.(json|safetensors|txt|model|jinja)|policy/scores\.safetensors"
)


@command("bundle", epilog="Example: rolloutmq bundle step111.rmq --step 111 --run-dir runs/demo")
def bundle_step(
    file: Annotated[Path, Argument(metavar="FILE", help="New file, such as step111.rmq.")],
    step: Annotated[int, Option("--step", min=1, help="A step of the archive.")],
    run_dir: RunDir = None,
    archive: ArchivePlace = None,
    max_mb: Annotated[
        int, Option("--max-mb", min=1, help="Most MB that state and model may have.")
    ] = 256,
    logprobs: Annotated[
        bool, Option("--logprobs", help="Store log-probabilities in place of state and model.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write one step of a run as a file that `rolloutmq replay` trains on any machine.

    It has the batch with its texts, the checkpoint before the step, the first weights, settings,
    versions, and the numbers that came out: what a report of a bug needs. Needs the checkpoint of
    the step before, and [retention] policy = "archive". With --logprobs, the step is trained once
    here, on one rank; `replay` then compares rewards, advantages, masks and losses, but no
    gradient norm and no state.
    """
    parent = choose_parent(run_dir)
    records = archive_of(parent, archive)
    most = None if logprobs else max_mb * 10**6
    size, differing = write_bundle(parent, records, step, file, most)
    shown = [Text(f"{file}: {size / 1e6:.1f} MB. To train it again: rolloutmq replay {file}")]
    for name, own, new in differing[:1]:
        what = f"`replay` will find {name} = {new!r}, as here; the run logged {own!r}"
        shown.append(marked("note", what))
    document = {"file": str(file), "step": step, "bytes": size, "differing": differing}
    Output(document, shown).print(as_json=as_json)


def write_bundle(
    run: Path, archive: Archive, step: int, target: Path, most_bytes: int | None
) -> tuple[int, list[tuple[str, float, float]]]:
    """Write the bundle of a step; return its bytes, and what was trained otherwise.

    `most_bytes`: of state and model; None: log-probabilities are stored in their place. Raises
    ConfigError where the checkpoint before it is not kept, or state and model are larger.
    """
    file = archive.open(step)
    before = checkpoint_of(run, step - 1) if step > 1 else None
    terms = {f"{TERMS}/{path.name}": path for path in (run / TERMS).glob("*.json")}
    differing = []
    with tempfile.TemporaryDirectory(prefix="rolloutmq-") as place:
        if most_bytes is None:
            from rolloutmq.extensions.records.recorded_policy import SCORES, record_step

            files = {str(SCORES): Path(place) / SCORES.name}
            differing = record_step(run, file, files[str(SCORES)])
        else:
            model = config_of(file.facts.config, run={"dir": str(run)}).model_folder
            state = [*before.iterdir()] if before else []
            files = {f"checkpoints/{path.parent.name}/{path.name}": path for path in state}
            files |= {f"model/{path.name}": path for path in model.iterdir()}
        chosen = {name: path for name, path in files.items() if _NAMES.fullmatch(name)}
        size = sum(path.stat().st_size for path in chosen.values())
        if most_bytes is not None and size > most_bytes:
            raise ConfigError(
                f"state and model have {size / 1e6:,.0f} MB, more than {most_bytes / 1e6:,.0f}",
                hint="--max-mb sets another limit; --logprobs stores log-probabilities instead",
            )
        with zipfile.ZipFile(target, "x") as bundle:
            bundle.writestr(f"archive/step-{step:07d}.rmq", archive.raw(step))
            for name, path in (terms | chosen).items():
                bundle.write(path, name)
            own = [line for number, line in log_lines(run / STEPS_FILE) if number == step]
            bundle.writestr(STEPS_FILE, b"".join(own[-1:]))
    return target.stat().st_size, differing


def open_bundle(file: Path, folder: Path) -> int:
    """Unpack a bundle into a run folder; return its step. Raises RecordDamaged, ConfigError.

    A config that names functions is refused: they would be imported and called.
    """
    try:
        with zipfile.ZipFile(file) as bundle:
            infos = bundle.infolist()
            wrong = [info.filename for info in infos if not _NAMES.fullmatch(info.filename)]
            if wrong or sum(info.file_size for info in infos) > MOST_BYTES:
                raise ConfigError(
                    f"{file} is no bundle: it has {wrong[0] if wrong else 'too many bytes'}",
                    hint="`rolloutmq bundle` writes one; of an archive's file, name the run",
                )
            for info in infos:
                path = folder / info.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(bundle.read(info))
        records = Archive(folder / "archive")
        (step,) = records.steps()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
        hint = "ask for another copy"
        raise RecordDamaged(f"{file} cannot be read: {error}", hint=hint) from error
    batch = records.open(step)
    batch.check()
    config = config_of(batch.facts.config)
    for name in (config.trainer.advantages, config.learner.loss.objective):
        if is_dotted_path(name):
            raise ConfigError(
                f"the bundle trains with {name}, which is code of its sender",
                hint="look at the code, then replay the folder: unzip the bundle, and give the "
                "folder to `rolloutmq replay`",
            )
    return step
