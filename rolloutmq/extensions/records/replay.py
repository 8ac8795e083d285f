"""Train recorded batches again, by the code of the trainer and without workers.

The batches of an archive are put on a server of the replay's own, one step at a time, and every
rank reads its share there as it did before. With the settings of the run, numbers and state are
equal bit for bit, on the same kind of machine with the same numbers of ranks and threads.

All ranks call `prepare` and `train`; rank 0 alone writes into the folder of the new run.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import torch

from buffer.errors import ConfigError, ModelError
from buffer.ids import new_nonce
from buffer.ledger.position import Position
from buffer.manifest import Manifest
from buffer.redis.bulk_io import Command
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.run.open import write_nonce
from buffer.run.run import Run
from buffer.wire.rollout import FIRST_WEIGHTS
from consumer.grpo.model_state.saved_state import SavedState
from consumer.grpo.reporting.metric_writers import open_writers
from consumer.grpo.reporting.metrics import staleness_metrics
from consumer.grpo.reporting.reporter import Reporter
from consumer.grpo.trainer_rank import TrainerRank
from consumer.handle.checkpoint import CheckpointFolder, state_paths
from consumer.handle.ranks import Ranks, on_all_ranks
from consumer.handle.step_log import TrainedStep, read_steps
from rolloutmq.config.config import Config
from rolloutmq.config.kept_config import keep_config, read_config
from rolloutmq.extensions.records.archive import Archive
from rolloutmq.extensions.records.folders import link_checkpoint
from rolloutmq.extensions.records.step_file import StepFile, config_of
from rolloutmq.launch.terms import keep_terms, terms_of

MAY_CHANGE = (
    *("learner.*", "critic.*", "trainer.advantages", "trainer.reward_weights"),
    *("trainer.overlong_buffer_tokens", "trainer.max_sequence_tokens", "trainer.mask_truncated"),
)
"""Keys that decide what a batch teaches, which a replay may set."""

OF_THE_MACHINE = ("memory/", "time/")
"""Metrics that differ between two trainings of one batch."""

LINEAGE = "replay"

Difference = tuple[str, float, float]
"""The name of a metric, its value in the run's log, and the value of the replay."""


class State:
    """The weights and the optimizer of all ranks."""

    def __init__(self, rank: TrainerRank) -> None:
        self.rank = rank
        self.orders = rank.orders
        self.orders.add("state", self)

    @on_all_ranks
    def digest(self) -> str:
        """Return the SHA-256 of the digests of all ranks."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.rank.controller.state_tensors().items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        parts = self.orders.ranks.gather(digest.hexdigest())
        return hashlib.sha256("".join(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step that was trained again. `state`: hash of weights and optimizer behind it.

    If it was to be trained as the run did: its `differences`, and the `ranks` of the run's trainer.
    """

    step: int
    state: str
    seconds: float
    differences: Sequence[Difference]
    ranks: int


class Phase(NamedTuple):
    """Steps `first` to `last`, which one config trains from the checkpoint before them."""

    config: Config
    first: int
    last: int
    is_own: bool
    """whether it trains as the run did"""


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay of the run in folder `parent` in `folder`, from the first weights in `model`.

    All phases but the last train as the run did; `overrides` are in the last one's config.
    """

    parent: Path
    archive: Archive
    folder: Path
    model: Path
    phases: Sequence[Phase]
    overrides: Sequence[str]

    def train(self, ranks: Ranks) -> Iterator[ReplayedStep]:
        """Train all steps on this rank; rank 0 yields each. A checkpoint ends each phase."""
        with self._server(ranks) as run:
            for phase in self.phases:
                rank = TrainerRank(run, phase.config, self.model, ranks)
                state = State(rank)
                if ranks.rank:
                    rank.follow()
                    continue
                try:
                    yield from self._train(run, state, phase)
                finally:
                    rank.orders.end()
                    rank.parts.close()

    def _train(self, run: Run, state: State, phase: Phase) -> Iterator[ReplayedStep]:
        rank = state.rank
        known = {step.step: step for step in read_steps(self.parent)}
        checkpoints = CheckpointFolder(self.folder / "checkpoints")
        start = phase.first - 1
        position = checkpoints.read(start) if start else Position()
        position.run, position.run_nonce, position.lineage = run.name, run.nonce, LINEAGE
        if phase.is_own:
            kept = CheckpointFolder(self.parent / "checkpoints")
            terms_by_step = kept.read(kept.steps()[-1]).terms if kept.steps() else {}
            position.terms = {n: each for n, each in terms_by_step.items() if n <= phase.last}
        else:
            terms = terms_of(phase.config, self.model)
            position.set_terms(keep_terms(self.folder, terms))
        rank.load(start)
        with closing(Reporter(phase.config, run.buffer, self.model)) as reporter:
            reporter.open(open_writers(phase.config, phase.first))
            for step in range(phase.first, phase.last + 1):
                began = time.monotonic()
                manifest, trained_on = place(run, self.archive.open(step))
                groups, problems = rank.reader.read(manifest)
                if problems:
                    raise ModelError(f"step {step} cannot be trained again: {problems}")
                metrics, columns, scores = rank.fit(step, groups=groups)
                metrics = metrics | columns.metrics() | staleness_metrics(manifest)
                seconds = time.monotonic() - began
                reporter.delivered(manifest, groups, LINEAGE, 0.0)
                reporter.histograms = columns.histograms()
                reporter.reported(step, metrics | {"time/step_s": seconds}, "")
                reporter.add_samples(manifest, columns, groups, scores)
                reporter.flush()  # it reads the groups
                clear(run, manifest)
                position.add(manifest)
                digest, ranks, found = state.digest(), rank.ranks.size, list[Difference]()
                if phase.is_own:
                    found, ranks = differing(metrics, known.get(step)), trained_on
                yield ReplayedStep(step, digest, seconds, found, ranks)
        written = checkpoints.begin(phase.last)
        rank.begin_state(str(written))
        rank.end_state()
        checkpoints.complete(position, written)

    @contextmanager
    def _server(self, ranks: Ranks) -> Iterator[Run]:
        """Yield the run on a server of its own, which rank 0 starts."""
        config = self.phases[-1].config
        with ExitStack() as stack:
            url = ""
            if ranks.rank == 0:
                # not "server", by which `status` and `fsck` would find this part of a run
                server = stack.enter_context(EmbeddedServer(self.folder / "replayed"))
                stack.callback(shutil.rmtree, server.folder, ignore_errors=True)
                url = server.url
            store = stack.enter_context(closing(Store(ranks.share(url))))
            if ranks.rank == 0:
                nonce, model = new_nonce(), str(self.model)
                write_nonce(self.folder, nonce)
                Run.create(store, config.run.name, nonce, config.limits(0), FIRST_WEIGHTS, model)
                keep_config(config, read_config(self.parent), self.overrides)
                if begin := self.phases[0].first - 1:
                    theirs = CheckpointFolder(self.parent / "checkpoints").path(begin)
                    mine = CheckpointFolder(self.folder / "checkpoints").path(begin)
                    link_checkpoint(theirs, mine)
            ranks.share(True)  # run and checkpoint exist
            yield Run.open(store, config.run.name)

    def differing_tensor(self) -> str | None:
        """Return the first tensor that differs from the run's own checkpoint of the last step.

        "": none; None: the run has kept no such checkpoint.
        """
        last = self.phases[-1].last
        theirs = CheckpointFolder(self.parent / "checkpoints").path(last)
        mine = CheckpointFolder(self.folder / "checkpoints").path(last)
        if not theirs.exists():
            return None
        for rank in range(len(state_paths(theirs))):
            with SavedState(theirs, rank=rank) as own, SavedState(mine, rank=rank) as again:
                for name in sorted(own.keys() | again.keys()):
                    both = name in own and name in again
                    if not both or not torch.equal(own[name], again[name]):
                        return name
        return ""


def prepare(
    parent: Path,
    archive: Archive,
    folder: Path,
    start: int,
    last: int,
    overrides: Sequence[str],
    judges: Sequence[str] = (),
) -> Replay:
    """Prepare a replay of a run from its checkpoint of step `start` (0: its model) to step `last`.

    Where that checkpoint is not kept, earlier steps are trained as the run did. `folder`: of the
    new run. `judges`: as `overrides`, of those that have scored the archive. Raises ConfigError
    for what cannot be replayed.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE):
            raise ConfigError(
                f"--set {key}: a replay trains rollouts that exist",
                hint=f"it may set {', '.join(MAY_CHANGE)}",
            )
    kept = CheckpointFolder(parent / "checkpoints")
    begin = max((step for step in kept.steps() if step <= start), default=0)
    if start >= last:
        raise ConfigError(f"no step from {start + 1} to {last}", hint="set --from below --to")
    if missing := sorted({*range(begin + 1, last + 1)} - {*archive.steps()}):
        raise ConfigError(
            f"{archive.place} lacks step {missing[0]}; the replay needs steps {begin + 1} to {last}"
            + (f": checkpoint {start} is not kept" if begin < start else ""),
            hint=f"set --to {missing[0] - 1}, put the file back if there was one, or set --from to "
            f"a later checkpoint (kept: {', '.join(map(str, kept.steps())) or 'none'})",
        )
    facts = archive.open(begin + 1).facts
    given = facts.config
    if facts.threads:
        torch.set_num_threads(facts.threads)
    # its own model, or that of a bundle
    own_model = {"model": str(parent / "model")} if (parent / "model").is_dir() else {}
    own = config_of(given, run={"dir": str(parent)}, policy=own_model)
    place = {"name": folder.name, "dir": str(folder)}
    if own.run.columns:
        place["columns"] = str(folder / "columns")
    # it has the device to itself: nothing would wake a trainer that sleeps for engines
    alone = {"writers": [], "flow": "disaggregated"}
    unchanged = config_of(given, run=place, trainer=alone)
    changed = config_of(given, [*overrides, *judges], run=place, trainer=alone)
    phases = [Phase(changed, start + 1, last, is_own=not (overrides or judges))]
    if begin < start:
        phases.insert(0, Phase(unchanged, begin + 1, start, is_own=True))
    return Replay(parent, archive, folder, own.model_folder, phases, [*overrides, *judges])


def place(run: Run, file: StepFile) -> tuple[Manifest, int]:
    """Put the payloads of a batch where a take left them, and the tokens that balance shares.

    Return the manifest, and the number of ranks that trained it.
    """
    keys = run.keys
    for entry, group in zip(file.manifest.entries, file.groups(), strict=True):
        ref, data = entry.payload, file.payload(entry)
        size = -(-len(data) // ref.chunks)
        names = keys.payload_chunks(ref.gid, ref.token, ref.chunks)
        commands: list[Command] = [
            ("SET", name, data[n * size : (n + 1) * size]) for n, name in enumerate(names)
        ]
        commands.append(("HSET", keys.group(ref.gid), "tokens", int(group.lengths.sum())))
        run.store.send("replay", commands)
    if run.columns.root:
        file.extract_columns(run.columns.root)
    return file.manifest, file.facts.ranks


def clear(run: Run, manifest: Manifest) -> None:
    for ref in [entry.payload for entry in manifest.entries]:
        chunks = run.keys.payload_chunks(ref.gid, ref.token, ref.chunks)
        names = [*chunks, run.keys.group(ref.gid)]
        run.store.send("replay", [("UNLINK", name) for name in names])


def differing(
    metrics: Mapping[str, float], known: TrainedStep | None, tolerance: float = 0.0
) -> list[Difference]:
    """Return the metrics that the run has logged otherwise. `tolerance`: relative."""
    own = known.metrics if known else {}
    return [
        (name, own[name], value)
        for name, value in metrics.items()
        if name in own
        and not math.isclose(own[name], value, rel_tol=tolerance)
        and not name.startswith(OF_THE_MACHINE)
    ]
