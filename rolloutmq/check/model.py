"""Check the model folder, its tokenizer, and that the trainer can train its architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from buffer.errors import HubError
from buffer.weights.safetensors_files import MODEL_LOADING
from consumer.grpo.models.model_folder import check_model_folder, load_tokenizer
from producer_workers.config.task import attached_kinds
from producer_workers.engines.model_folder import eos_ids, vocabulary_size
from producer_workers.hub import model_repository
from rolloutmq.check import training
from rolloutmq.check.finding import Finding, Unit, absent, findings_of
from rolloutmq.check.shape import read_shape
from rolloutmq.config.config import Config

# sizes of the random model on which an architecture is tested
SMALL = {
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
}
ok, warning, mistake = findings_of("model")


def units(config: Config, *, quick: bool) -> list[Unit]:
    judges = [
        Unit("model", what, partial(_check_judge, check))
        for kind in attached_kinds(config.tasks)
        for what, check in kind.checks(config).items()
    ]
    tried = [] if quick else training.units(config)
    return [*_student_units(config, quick=quick), *judges, *tried]


def _student_units(config: Config, *, quick: bool) -> list[Unit]:
    try:
        folder = config.model_folder
    except HubError:
        found = [absent("model", model_repository(config.policy))]
        return [Unit("model", str(config.policy.model), partial(iter, found))]
    if config.policy.model is None and not folder.is_dir():
        return [Unit("model", "the model that the run builds", partial(_check_warm_start, config))]
    checks = {"its files": _check_files}
    if not quick and (folder / "config.json").is_file():
        checks["its tokenizer"] = partial(_check_tokenizer, config)
        if config.trainer.loop is None:
            checks["its architecture"] = _check_architecture
    return [
        Unit("model", f"{folder}, {what}", partial(check, folder)) for what, check in checks.items()
    ]


def _check_judge(check: Callable[[], str]) -> Iterator[Finding]:
    try:
        yield ok(check())
    except HubError as error:
        yield warning(f"not checked: {error.message}", error.hint)


def _check_warm_start(config: Config) -> Iterator[Finding]:
    training = [config.tasks[name] for name in config.training_tasks]
    has_problems = any(getattr(task.dataset, "warm_start_size", 0) for task in training)
    if config.warm_start.max_steps and not has_problems:
        yield mistake(
            "there is no [policy] model, and no task has problems on which one could be trained",
            "set [policy] model, or warm_start_size of a reasoning_gym data set, or [warm_start] "
            "max_steps = 0 for random weights",
        )


def _check_files(folder: Path) -> Iterator[Finding]:
    check_model_folder(folder)
    shape = read_shape(folder)
    context = f", reads {shape.positions:,} tokens" if shape.positions else ""
    millions = shape.parameters / 1e6
    size = f"{millions:.1f} million" if millions < 100 else f"{millions / 1000:.2f} billion"
    yield ok(f"{folder}: {shape.name}, {size} parameters{context}")


def _check_tokenizer(config: Config, folder: Path) -> Iterator[Finding]:
    tokenizer = load_tokenizer(folder)
    ends, size = eos_ids(folder), vocabulary_size(folder)
    if not ends:
        yield warning(
            f"{folder} names no token that ends a response: every one runs to max_tokens",
            "set eos_token_id in its generation_config.json",
        )
    elif size is not None and max(ends) >= size:
        yield mistake(
            f"{folder}: eos_token_id {max(ends)} is beyond its {size:,} token ids, so no response "
            "can end",
            "correct eos_token_id in its generation_config.json, or vocab_size in its config.json",
        )
    else:
        samples = [config.tasks[name].sample for name in config.training_tasks]
        stops = {end for sample in samples for end in sample.stop_token_ids} | set(ends)
        texts = [text for sample in samples for text in sample.stops]
        yield from _check_turn(folder, tokenizer, stops, texts)


def _check_turn(
    folder: Path, tokenizer: Any, ends: set[int], stops: Sequence[str]
) -> Iterator[Finding]:
    """Compare what a prompt and `ends` are with the turns that the chat template writes."""
    asked = {"role": "user", "content": "6 * 7?"}
    answered = {"role": "assistant", "content": "It is 42."}
    write = partial(tokenizer.apply_chat_template, tokenize=False)
    try:
        closed = str(write([asked], add_generation_prompt=False))
        opened = str(write([asked], add_generation_prompt=True))
        turns = str(write([asked, answered], add_generation_prompt=False))
    except Exception as error:  # a template is a program, and may refuse these messages
        yield ok(f"{folder}: its turns were not compared ({error!s:.100})")
        return
    before, answer, behind = turns.rpartition(answered["content"])
    start = before.removeprefix(closed)
    if answer and closed == opened and before.startswith(closed) and start.strip():
        yield mistake(
            f"{folder}: its chat template opens no turn of the assistant: prompts end without "
            f"{start!r:.80}, which begins each of its turns",
            "let chat_template write it where add_generation_prompt is set",
        )
    written = tokenizer.encode(behind, add_special_tokens=False)
    is_ended = ends & set(written) or any(map(behind.count, stops))
    if answer and behind.strip() and not is_ended:
        added = tokenizer.added_tokens_decoder.items()
        special = {*tokenizer.all_special_ids, *(id_ for id_, token in added if token.special)}
        given = ", ".join(f"{end} ({tokenizer.decode([end])!r:.40})" for end in sorted(ends))
        yield (warning if ends & special else mistake)(
            f"{folder}: its chat template ends a turn of the assistant with {behind.strip()!r:.80}"
            f", and eos_token_id is {given}: responses end elsewhere, or at max_tokens",
            f"add {written[0]} to eos_token_id in its generation_config.json",
        )


def _check_architecture(folder: Path) -> Iterator[Finding]:
    """Run the trainer's probes on a small model of the architecture, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from consumer.grpo.models.shards import empty_model
    from consumer.grpo.policy.logprobs import TargetLogits
    from consumer.grpo.policy.model_checks import check_logprobs, keeps_samples_apart

    name = type(empty_model(folder)).__name__
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        sizes = config.get_text_config()
        for key, most in SMALL.items():
            if isinstance(value := getattr(sizes, key, None), int):
                setattr(sizes, key, min(value, most))
        if kinds := getattr(sizes, "layer_types", None):
            sizes.layer_types = kinds[: sizes.num_hidden_layers]
        # ids of the real vocabulary
        sizes.pad_token_id = sizes.bos_token_id = sizes.eos_token_id = None
        with MODEL_LOADING:
            policy = TargetLogits(AutoModelForCausalLM.from_config(config))
    except Exception as error:  # the code of any architecture, with sizes that it does not expect
        yield warning(
            f"{name}: not tested on a small model ({type(error).__name__}: {error:.100})",
            "the trainer tests it when it loads the model",
        )
        return
    check_logprobs(policy)
    packs = "packs" if keeps_samples_apart(policy) else "does not pack"
    yield ok(f"the trainer computes {name}'s log-probabilities, and {packs} its samples")
