"""`rolloutmq show GID`: show one group with its record, conversation and rollouts."""

from __future__ import annotations

from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.text import Text

from buffer.errors import ConfigError
from buffer.model.ids import split_group_id
from buffer.monitoring.console import console, plain
from buffer.monitoring.found_group import FoundGroup, find_group
from buffer.rollouts.group import RolloutGroup
from buffer.rollouts.rollout import RolloutState
from rolloutmq.options import AsJson, RedisUrl, RunDir, RunName, open_target
from rolloutmq.output import count, emit, facts, state, version_style

EPILOG = "Example: rolloutmq show math-0000000042 --member 3"

_BAR = 40
_SHORT = ("task", "draw", "stage", "status", "lane", "owner", "batch", "tries", "aborts", "samples",
          "tokens", "version", "lineage", "reward", "payload", "chunks", "size", "crc")  # fmt: skip


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(show)


def show(
    gid: Annotated[
        str, typer.Argument(metavar="GID", help="Id of a group, for example math-0000000042.")
    ],
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
    version.
    """
    split_group_id(gid)
    with open_target(redis_url, run_dir, run) as target:
        found = find_group(target.run, gid)
    if as_json:
        states = _chosen(found.group, member) if found.group else []
        emit(found.document(states, tokens=tokens))
    else:
        print_group(console(), found, member, tokens)


def _chosen(group: RolloutGroup, member: int | None) -> list[RolloutState]:
    return group.states if member is None else [_member(group, member)]


def _member(group: RolloutGroup, index: int) -> RolloutState:
    for rollout in group.states:
        if rollout.index == index:
            return rollout
    raise ConfigError(
        f"{group.gid} has no member {index}", hint=f"it has {len(group)}, counted from 0"
    )


def print_group(
    screen: Console, found: FoundGroup, member: int | None = None, tokens: bool = False
) -> None:
    """Print a group, or one rollout of it."""
    gid = found.gid
    letter = found.letter
    record = found.record
    if found.group is None:
        (end,) = found.places
        screen.print(Text.assemble((gid, "bold"), "  ", state(end), f" {found.gone}"))
        screen.print(facts([("trace", found.trace)]))
        return
    states = _chosen(found.group, member)
    screen.print(Text.assemble((gid, "bold"), "  ", state(" + ".join(found.places) or "lost")))
    screen.print(
        facts(
            [
                *((name, plain(record[name])) for name in _SHORT if record.get(name)),
                ("trace", found.trace),
            ]
        )
    )
    if letter:
        screen.print(Text(f"dead letter: {plain(orjson.dumps(letter).decode())}", style="red"))
    _show_group(screen, found.group, states, tokens)


def _show_group(
    screen: Console, group: RolloutGroup, states: list[RolloutState], tokens: bool
) -> None:
    first = group.states[0]
    for message in first.messages:
        screen.print()
        screen.print(Text(f"{message.get('role', '?')}:", style="bold"))
        screen.print(Text(plain(str(message.get("content", "")))))
    if first.ground_truth is not None:
        screen.print(facts([("ground truth", plain(str(first.ground_truth)))]))
    if all(not len(rollout.response_ids) for rollout in states):
        screen.print(
            Text(f"\nnothing has been generated yet, of {len(group)} rollouts", style="dim")
        )
        return
    for rollout in states:
        _show_rollout(screen, rollout, tokens)


def _show_rollout(screen: Console, rollout: RolloutState, tokens: bool) -> None:
    score = (rollout.reward or {}).get("score")
    screen.print()
    screen.print(Text.assemble(
        (f"#{rollout.index} ", "bold"),
        state(rollout.status),
        (" score ", "dim"), "-" if score is None else f"{score:g}",
        (" · ", "dim"), f"{count(len(rollout.response_ids))} tokens",
        (" · finish ", "dim"), plain(rollout.finish_reason or "-"),
    ))  # fmt: skip
    screen.print(_version_bar(rollout))
    versions = {span.version for span in rollout.spans}
    style = version_style(versions.pop()) if len(versions) == 1 else ""
    screen.print(
        Text(plain(rollout.response), style=style)
        if rollout.response
        else Text("(no text)", style="dim")
    )
    others = {name: value for name, value in (rollout.reward or {}).items() if name != "score"}
    if others:
        screen.print(
            Text("rewards " + ", ".join(f"{k} {v:g}" for k, v in others.items()), style="dim")
        )
    if rollout.error:
        screen.print(Text(plain(rollout.error), style="red"))
    if tokens:
        pairs = zip(rollout.response_ids.tolist(), rollout.logprobs.tolist(), strict=True)
        screen.print(
            Text(" ".join(f"{token}({logprob:.2f})" for token, logprob in pairs), style="dim")
        )


def _version_bar(rollout: RolloutState) -> Text:
    """Return a bar with a coloured part per span, as long as its share of the tokens.

    Tokens without a span were not sampled.
    """
    total = len(rollout.response_ids)
    text = Text()
    if not total:
        return Text("no tokens", style="dim")
    for span in rollout.spans:
        text.append(
            "▇" * max(1, round(span.length / total * _BAR)), style=version_style(span.version)
        )
    for span in rollout.spans:
        where = f" {span.start}-{span.start + span.length - 1}" if len(rollout.spans) > 1 else ""
        text.append(f"  v{span.version}{where}", style=version_style(span.version))
    lineages = sorted({span.lineage for span in rollout.spans})
    text.append(f"  lineage {', '.join(lineages)}" if lineages else "", style="dim")
    return text
