"""Draws of a task: draw n is a pure function of n, so that the only state is the cursor (I3)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from msgspec import structs

from buffer.errors import ConfigError, DatasetError, Skip, WireError, describe
from buffer.ids import group_id
from buffer.wire import group_bytes
from buffer.wire.group import AGENT_RECORD, GROUP_TIME, RolloutGroup
from buffer.wire.rollout import RolloutState
from buffer.wire.sampling import SampleParams, derived_seed
from producer_workers.agent_loops.tokenizer import (
    BYTES_PER_TOKEN,
    ControlTokens,
    Tokenizer,
    encode_chat,
    with_system_prompt,
)
from producer_workers.config.task import NO_JUDGE, JudgeSpec
from producer_workers.datasets.dataset import Dataset, EncodedPrompt, Problem, RowPlace, place_of
from producer_workers.datasets.image_records import ImagePrompts
from producer_workers.datasets.row_values import byte_count
from producer_workers.images import ImageError
from producer_workers.judges.load import check_truth

# The origin of a prompt, which a sampler adds to `extra`.
ORIGIN_KEYS = ("epoch", "row", "prompt_hash")
JUDGED = "correct the row, or let a `record` function convert it; or take another judge"
RESERVED = {*ORIGIN_KEYS, GROUP_TIME, *AGENT_RECORD}

LONGEST_PROMPT = 2**21
"""Bytes of a prompt's texts without `max_prompt_tokens`: encoding these takes some 500 MB, and what
is longer could not be stored.
"""


@dataclass(frozen=True, slots=True)
class TooLong:
    """A draw whose prompt is too long: it is counted and skipped."""

    draw: int
    place: RowPlace


@dataclass(eq=False)
class Sampler:
    """Makes the groups of one task. Threads may share it.

    `tools`, `system_prompt`: for prompts that have none of their own. `images`: writes the
    images of a row into the run's folder. `judge`: refuses rows that it cannot judge.
    """

    task: str
    dataset: Dataset
    tokenizer: Tokenizer
    sample: SampleParams
    _: KW_ONLY
    prompt_repeat_k: int = 1
    seed: int = 0
    shuffle: bool = True
    max_prompt_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    images: ImagePrompts | None = None
    system_prompt: str | None = None
    judge: JudgeSpec = NO_JUDGE

    def gid(self, draw: int) -> str:
        return group_id(self.task, draw)

    def place(self, draw: int) -> RowPlace:
        return place_of(draw, len(self.dataset), self.seed, shuffle=self.shuffle)

    def draw(self, draw: int) -> list[RolloutState] | TooLong:
        """Return the `prompt_repeat_k` INIT rollouts of a draw. Raises DatasetError, Skip."""
        place = self.place(draw)
        problem = self._read(place)
        try:
            check_truth(self.judge, problem.data_source, problem.ground_truth)
        except ValueError as error:
            raise DatasetError(f"{self.task}: row {place.row}: {error}", hint=JUDGED) from error
        tokens = self.max_prompt_tokens
        most = LONGEST_PROMPT if tokens is None else BYTES_PER_TOKEN * tokens
        if byte_count([problem.messages, problem.tools or self.tools], most) > most:
            return TooLong(draw, place)
        prompt = self._encode(problem, place)
        if tokens is not None and len(prompt.ids) > tokens:
            return TooLong(draw, place)
        shown = self.images.keep(prompt) if self.images else []
        prompt_hash = blake2b(prompt.seed, digest_size=8).hexdigest()
        origin = dict(zip(ORIGIN_KEYS, (*place, prompt_hash), strict=True))
        return [
            RolloutState(
                index=index,
                messages=problem.messages,
                tools=problem.tools or self.tools or None,
                multimodal=shown,
                prompt_ids=prompt.ids,
                sample_params=self._params(draw, index, problem),
                data_source=problem.data_source,
                ground_truth=problem.ground_truth,
                extra={**problem.extra, **origin},
            )
            for index in range(self.prompt_repeat_k)
        ]

    def encode(self, draw: int, states: list[RolloutState]) -> bytes:
        """Return the payload of a draw's rollouts. Raises DatasetError."""
        try:
            return group_bytes.encode_checked(RolloutGroup(self.gid(draw), self.task, states))
        except WireError as error:
            message = f"{self.task}: row {self.place(draw).row}: {error.message}"
            raise DatasetError(message, hint=error.hint) from error

    def _read(self, place: RowPlace) -> Problem:
        try:
            problem = self.dataset.row(place.row, place.epoch)
            if self.system_prompt is None:
                return problem
            messages = with_system_prompt(problem.messages, self.system_prompt)
            return problem.model_copy(update={"messages": messages})
        except (DatasetError, Skip, KeyboardInterrupt):
            raise
        except BaseException as error:  # a data set may be the user's code
            reason = describe(error)
            raise DatasetError(f"{self.task}: row {place.row} cannot be read: {reason}") from error

    def _encode(self, problem: Problem, place: RowPlace) -> EncodedPrompt:
        if taken := RESERVED & set(problem.extra):
            message = f"{self.task}: row {place.row} uses the names {sorted(taken)}"
            raise DatasetError(message, hint="rename these columns of the data set")
        tools = problem.tools or self.tools or None
        try:
            if self.images:
                safe = ControlTokens.of(self.tokenizer)
                shown = {"messages": safe.in_messages(problem.messages)}
                return self.images.encode(problem.model_copy(update=shown), safe.broken_up(tools))
            ids = encode_chat(self.tokenizer, problem.messages, tools)
            return EncodedPrompt(np.array(ids, dtype="<i4"), [])
        except ImageError as error:
            raise DatasetError(f"{self.task}: an image of row {place.row}: {error}") from error
        except ConfigError as error:
            raise DatasetError(
                f"{self.task}: row {place.row}: {error.message}", hint=error.hint
            ) from error
        except Exception as error:  # a chat template is a program, and may raise anything
            raise DatasetError(
                f"{self.task}: row {place.row} does not fit the chat template: {error}",
                hint="see chat_template of the model's tokenizer, and the roles of the messages",
            ) from error

    def _params(self, draw: int, index: int, problem: Problem) -> SampleParams:
        changes: dict[str, Any] = {"structured": problem.structured} if problem.structured else {}
        if self.sample.seed is not None:
            changes["seed"] = derived_seed(self.seed, self.sample.seed, self.task, draw, index)
        return structs.replace(self.sample, **changes)
