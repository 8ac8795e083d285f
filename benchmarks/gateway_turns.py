"""`python -m benchmarks.gateway_turns`: what the gateway costs per turn, as a session grows.

An agent in a process of its own asks turn after turn, each time with the whole conversation, as
agents do; the engine answers at once. Measured is the processor time of the gateway's process from
one request of the engine to the next: parsing, matching the history, the tokens of the new
messages, recording, the answer. Beside it: applying the chat template to the whole conversation
and tokenizing it again at each turn, which is what is done without exact capture.
"""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import orjson
import typer
from numpy.typing import NDArray

from benchmarks.machine import machine_facts
from benchmarks.report import fill_in
from buffer.wire.rollout import FIRST_WEIGHTS, RolloutState, VersionSpan
from buffer.wire.sampling import SampleParams
from producer_workers.agent_loops.tokenizer import encode_chat
from producer_workers.config.distribution import Fixed
from producer_workers.config.engine import SimulatedConfig
from producer_workers.engines.base import Generation
from producer_workers.engines.simulated import SimulatedEngine
from rolloutmq.extensions.gateway.agents import AgentTask
from rolloutmq.extensions.gateway.guests import MOST_PER_S
from rolloutmq.extensions.gateway.loop import GatewayAgentLoop

HERE = Path(__file__).parent
MARK = "turns: written by `make bench-turns`"
TURNS = (8, 16, 32, 64, 128, 256)
ROUNDS = 3
AGAIN = "tokenized again"
TOKENS = 64  # of an answer, and about as many of a message
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' "
    "+ message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")
Json = dict[str, Any]


def build_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer, as Qwen's, of the sources of this project."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_000,
        special_tokens=[*SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = sorted(map(str, (HERE.parent / "producer_workers").rglob("*.py")))
    backend.train(files, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[1], chat_template=TEMPLATE
    )


def passages(tokenizer: Any, count: int) -> list[NDArray[np.int32]]:
    """Return `count` passages of TOKENS tokens, of this project's pages."""
    pages = sorted((HERE.parent / "docs" / "pages").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ids = np.array(tokenizer.encode(text * (1 + 10 * count * TOKENS // len(text))), "<i4")
    return [ids[n * TOKENS : (n + 1) * TOKENS] for n in range(count)]


class Instant(SimulatedEngine):
    """Answers at once with the next passage, and notes the processor time of each request."""

    def __init__(self, answers: Sequence[NDArray[np.int32]]) -> None:
        quick = Fixed(value=0.0)
        super().__init__(
            SimulatedConfig(first_token_s=quick, token_s=quick, response_tokens=quick),
            FIRST_WEIGHTS,
        )
        self._answers = answers
        self.asked_s: list[float] = []
        self.read: list[NDArray[np.int32]] = []

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        self.asked_s.append(time.process_time())
        self.read.append(prompt_ids)
        made = self._answers[len(self.asked_s) - 1]
        spans = (VersionSpan(0, len(made), 0, FIRST_WEIGHTS.lineage),)
        return Generation(made, np.full(len(made), -0.5, "<f4"), spans, "stop")


# -- agents, in a process of their own ------------------------------------------------------------


def ask_chat(history: list[Json], text: str) -> tuple[str, Json, Callable[[Json], None]]:
    history.append({"role": "user", "content": text})
    body = {"model": "m", "messages": history}
    return (
        "/v1/chat/completions",
        body,
        lambda found: history.append(found["choices"][0]["message"]),
    )


def ask_responses(history: list[Json], text: str) -> tuple[str, Json, Callable[[Json], None]]:
    history.append({"role": "user", "content": text})
    body = {"model": "m", "input": history}
    return "/v1/responses", body, lambda found: history.extend(found["output"])


def ask_messages(history: list[Json], text: str) -> tuple[str, Json, Callable[[Json], None]]:
    history.append({"role": "user", "content": text})
    body = {"model": "m", "max_tokens": 4096, "messages": history}

    def keep(found: Json) -> None:
        history.append({"role": "assistant", "content": found["content"]})

    return "/v1/messages", body, keep


def ask_text(history: list[Json], text: str) -> tuple[str, Json, Callable[[Json], None]]:
    history.append({"text": text})
    body = {"model": "m", "prompt": "".join(each["text"] for each in history), "max_tokens": 4096}
    return "/v1/completions", body, lambda found: history.append(found["choices"][0])


def ask_tokens(history: list[Json], text: str) -> tuple[str, Json, Callable[[Json], None]]:
    ids = [5 + byte % 200 for byte in text.encode()[:TOKENS]]
    history.append({"token_ids": ids})
    body = {"token_ids": [token for each in history for token in each["token_ids"]],
            "sampling_params": {}}  # fmt: skip
    return "/inference/v1/generate", body, lambda found: history.append(found["choices"][0])


DIALECTS = {
    "chat completions": ask_chat,
    "responses": ask_responses,
    "Anthropic's messages": ask_messages,
    "text": ask_text,
    "tokens": ask_tokens,
}


def talk(task: AgentTask, *, dialect: str, texts: Sequence[str]) -> float:
    """Ask one turn for each text, over one connection."""
    where = urlsplit(task.base_url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port)
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    history: list[Json] = []
    for text in texts:
        path, body, keep = DIALECTS[dialect](history, text)
        connection.request("POST", path, orjson.dumps(body), headers)
        answer = connection.getresponse()
        found = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {found[:500]!r}")
        keep(orjson.loads(found))
        time.sleep(1.1 / MOST_PER_S)  # a key may not ask more often
    return 1.0


# -- measured -------------------------------------------------------------------------------------


async def gateway_ms(tokenizer: Any, dialect: str, turns: int) -> list[float]:
    """Return the milliseconds of processor of each turn. Raises if tokens are not exact."""
    end = np.array([tokenizer.eos_token_id], "<i4")
    found = passages(tokenizer, 2 * turns)
    engine = Instant([np.concatenate([ids, end]) for ids in found[::2]])
    texts = [tokenizer.decode(ids) for ids in found[1::2]]
    loop = GatewayAgentLoop(
        judge=None,
        tokenizer=tokenizer,
        eos_ids={tokenizer.eos_token_id},
        agent="benchmarks.gateway_turns:talk",
        agent_options={"dialect": dialect, "texts": texts},
        parser="",
    )
    state = RolloutState(
        index=0,
        messages=[{"role": "user", "content": texts[0]}],
        prompt_ids=np.array([5], "<i4"),
        sample_params=SampleParams(max_tokens=10**6),
    )
    await loop.open()
    try:
        (made,) = await loop.generate_group([state], engine, "bench-0000000000")
    finally:
        await loop.close()
    whole = np.concatenate([made.prompt_ids, made.response_ids])
    last = np.concatenate([engine.read[-1], engine._answers[turns - 1]])
    if len(engine.read) != turns or not np.array_equal(whole, last):
        raise RuntimeError(f"{dialect}: the recorded tokens are not those of the engine")
    return list(1000 * np.diff(engine.asked_s))


def again_ms(tokenizer: Any, turns: int) -> list[float]:
    """Return the milliseconds of processor to tokenize the whole conversation at each turn."""
    texts = [tokenizer.decode(ids) for ids in passages(tokenizer, 2 * turns)]
    messages: list[Json] = []
    spent = []
    for turn in range(turns):
        messages.append({"role": "user", "content": texts[2 * turn + 1]})
        began = time.process_time()
        encode_chat(tokenizer, messages)
        spent.append(1000 * (time.process_time() - began))
        messages.append({"role": "assistant", "content": texts[2 * turn]})
    return spent


def rows(ms: Mapping[str, Sequence[float]], turns: Sequence[int]) -> list[str]:
    lines = ["| ms of processor at turn | " + " | ".join(map(str, turns)) + " |"]
    lines.append("|---|" + "---:|" * len(turns))
    for name, each in ms.items():
        lines.append(f"| {name} | " + " | ".join(f"{value:.1f}" for value in each) + " |")
    return lines


def draw(ms: Mapping[str, Sequence[float]], turns: Sequence[int], path: Path) -> None:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(7, 4), layout="constrained")
    axes = canvas.add_subplot()
    for name, each in ms.items():
        style: Json = {"color": "tab:gray", "linestyle": "--"} if name == AGAIN else {}
        axes.plot(turns, each, marker="o", label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(turns, list(map(str, turns)))
    axes.set_yscale("log")
    axes.set_xlabel(f"turn of a session (some {2 * TOKENS} tokens each)")
    axes.set_ylabel("ms of processor per turn")
    axes.legend()
    canvas.savefig(path, dpi=110)


def write(ms: Mapping[str, Sequence[float]], turns: Sequence[int]) -> None:
    """Write results, picture and the table of the README."""
    facts = machine_facts()
    shown = ", ".join(f"{name} {value}" for name, value in facts.items())
    fill_in(HERE / "README.md", MARK, [*rows(ms, turns), "", f"{shown}."])
    found = {"machine": facts, "turns": list(turns), "ms": ms}
    (HERE / "results" / "gateway_turns.json").write_bytes(orjson.dumps(found))
    draw(ms, turns, HERE / "results" / "gateway_turns.png")


def main(
    most: int = typer.Option(256, help="turns of a session"),
    update: bool = typer.Option(False, "--update", help="write results and README"),
) -> None:
    """Measure the gateway's turns in each dialect, and tokenizing the conversation again."""
    tokenizer = build_tokenizer()
    rounds = {
        name: [asyncio.run(gateway_ms(tokenizer, name, most + 1)) for _ in range(ROUNDS)]
        for name in DIALECTS
    }
    rounds[AGAIN] = [again_ms(tokenizer, most) for _ in range(ROUNDS)]
    # other work on the machine only adds
    spent = {name: np.min(each, axis=0).tolist() for name, each in rounds.items()}
    turns = [n for n in TURNS if n <= most]
    # the median of eight turns
    ms = {name: [round(median(each[n - 8 : n]), 2) for n in turns] for name, each in spent.items()}
    typer.echo("\n".join(rows(ms, turns)))
    if update:
        write(ms, turns)


if __name__ == "__main__":
    typer.run(main)
