"""`rolloutmq show GID`: show one group with its record, conversation and rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.text import Text

from buffer.errors import ConfigError
from buffer.model.ids import split_group_id
from buffer.rollouts.rollout import VersionSpan
from rolloutmq.console import console, plain
from rolloutmq.options import (
    AsJson,
    GroupId,
    RedisUrl,
    RunDir,
    RunName,
    open_target,
    stopped_samples,
)
from rolloutmq.output import count, emit, facts, state, version_style
from rolloutmq.views.found_group import FoundGroup, find_group

EPILOG = "Example: rolloutmq show math-0000000042 --member 3"

_BAR = 40
_SHORT = ("task", "draw", "stage", "status", "lane", "owner", "batch", "tries", "aborts", "samples",
          "tokens", "version", "lineage", "reward", "payload", "chunks", "size", "crc")  # fmt: skip


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(show)


def show(
    gid: GroupId,
    member: Annotated[
        int | None, typer.Option(min=0, help="Show only this rollout of the group.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also print token ids and logprobs.")
    ] = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Show one group: its stage, texts, rewards and versions.

    A bar for every rollout shows which weights sampled which tokens, one colour per policy
    version. The texts of a group whose payload is freed are read from the sample log in the run's
    folder, if they are there ([samples]).
    """
    split_group_id(gid)
    stopped = stopped_samples(redis_url, run_dir)
    sample = stopped.find(gid) if stopped else None
    if sample:
        found = FoundGroup(gid, "", [], {}, sample=sample)
    else:
        with open_target(redis_url, run_dir, run) as target:
            found = find_group(target.run, gid, target.samples)
    document = found.document(tokens=tokens)
    if member is not None:
        document["members"] = [_member(document, member)]
    if as_json:
        emit(document)
    else:
        print_group(console(), document)


def _member(document: Mapping[str, Any], index: int) -> dict[str, Any]:
    for member in document["members"]:
        if member["index"] == index:
            found: dict[str, Any] = member
            return found
    raise ConfigError(
        f"{document['gid']} has no member {index}",
        hint=f"it has {len(document['members'])}, counted from 0",
    )


def print_group(screen: Console, document: Mapping[str, Any]) -> None:
    """Print a group, from its document (`FoundGroup.document`)."""
    heading = Text.assemble((document["gid"], "bold"), "  ", state(_where(document)))
    screen.print(heading.append(f" {document['gone']}" if document["gone"] else ""))
    record = document["record"] or {}
    named = [(name, plain(record[name])) for name in _SHORT if record.get(name)]
    if document["sampled"]:
        sampled = document["sampled"]
        named.append(("step", f"{sampled['step']} (from the sample log: {sampled['why']})"))
    screen.print(facts([*named, *([("trace", trace)] if (trace := document["trace_id"]) else [])]))
    if letter := document["dead_letter"]:
        screen.print(Text(f"dead letter: {plain(orjson.dumps(letter).decode())}", style="red"))
    if document["members"]:
        _show_texts(screen, document)


def _where(document: Mapping[str, Any]) -> str:
    return " + ".join(document["places"]) or ("trained" if document["sampled"] else "lost")


def _show_texts(screen: Console, document: Mapping[str, Any]) -> None:
    if document.get("prompt"):
        screen.print(Text(plain(document["prompt"])))
    for message in document.get("messages", []):
        screen.print()
        screen.print(Text(f"{message.get('role', '?')}:", style="bold"))
        screen.print(Text(plain(str(message.get("content", "")))))
    if document.get("ground_truth") is not None:
        screen.print(facts([("ground truth", plain(str(document.get("ground_truth"))))]))
    members = document["members"]
    if not any(member["tokens"] for member in members):
        screen.print(
            Text(f"\nnothing has been generated yet, of {len(members)} rollouts", style="dim")
        )
        return
    for member in members:
        _show_rollout(screen, member)


def _show_rollout(screen: Console, member: Mapping[str, Any]) -> None:
    reward = member["reward"] or {}
    score = reward.get("score")
    screen.print()
    screen.print(Text.assemble(
        (f"#{member['index']} ", "bold"),
        state(member["status"]),
        (" score ", "dim"), "-" if score is None else f"{score:g}",
        (" · ", "dim"), f"{count(member['tokens'])} tokens",
        (" · finish ", "dim"), plain(member["finish_reason"] or "-"),
    ))  # fmt: skip
    screen.print(_version_bar(member))
    _show_response(screen, member)
    others = {name: value for name, value in reward.items() if name != "score"}
    if others:
        text = ", ".join(f"{name} {value:g}" for name, value in others.items())
        screen.print(Text(f"rewards {plain(text)}", style="dim"))
    if member["error"]:
        screen.print(Text(plain(member["error"]), style="red"))
    if "response_ids" in member:
        pairs = zip(member["response_ids"], member["logprobs"], strict=True)
        screen.print(
            Text(" ".join(f"{token}({logprob:.2f})" for token, logprob in pairs), style="dim")
        )


def _show_response(screen: Console, member: Mapping[str, Any]) -> None:
    """Print the response; text that was not sampled, a tool's for example, is dim."""
    versions = {span["version"] for span in member["spans"]}
    style = version_style(versions.pop()) if len(versions) == 1 else ""
    turns = member.get("turns") or [{"trained": True, "text": member["response"]}]
    text = Text()
    for turn in turns:
        text.append(plain(turn["text"]), style=style if turn["trained"] else "dim")
    screen.print(text if text.plain else Text("(no text)", style="dim"))


def _version_bar(member: Mapping[str, Any]) -> Text:
    """Return a bar with a coloured part per span, as long as its share of the tokens.

    Tokens without a span were not sampled.
    """
    total = member["tokens"]
    spans = [VersionSpan(**span) for span in member["spans"]]
    text = Text()
    if not total:
        return Text("no tokens", style="dim")
    for span in spans:
        text.append(
            "▇" * max(1, round(span.length / total * _BAR)), style=version_style(span.version)
        )
    for span in spans:
        where = f" {span.start}-{span.start + span.length - 1}" if len(spans) > 1 else ""
        text.append(f"  v{span.version}{where}", style=version_style(span.version))
    lineages = sorted({span.lineage for span in spans})
    text.append(f"  lineage {', '.join(lineages)}" if lineages else "", style="dim")
    return text
