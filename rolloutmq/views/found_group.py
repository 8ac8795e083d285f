"""Find one group of a run by its id, also after its end, and show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from buffer.errors import AccountError, ConfigError
from buffer.failure_text import headline
from buffer.groups.record_walk import payload_of
from buffer.ids import ENDS, IMPORTED_FROM, split_group_id, trace_id
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from buffer.wire.group_json import group_json
from buffer.wire.rollout import VersionSpan
from consumer.handle.sample_log import Sample, SampleLog
from rolloutmq.output import count, facts, known, state, version_style

_WHY_GONE = {
    "archived": "trained and committed",
    "filtered": "filtered out before training",
    "dropped": "too old, unusable, or dropped by hand",
    "skipped": "its prompt makes no sense: `rolloutmq ls --stage skipped` says why",
}
_MAY = {"waiting": ("drop",), "pool": ("requeue", "drop"), "dead": ("requeue", "drop")}


@dataclass(frozen=True, slots=True)
class FoundGroup:
    """A group with everything known of it; `record` is empty for one that has ended."""

    gid: str
    trace: str = ""
    stages: list[str] = field(default_factory=list)
    record: dict[str, str] = field(default_factory=dict)
    letter: Any = None
    group: RolloutGroup | None = None
    sample: Sample | None = None  # line of the sample log, for a group that has ended

    @property
    def gone(self) -> str:
        """How the group ended; "" if it has not."""
        if self.record or not self.stages:
            return ""
        return f"{_WHY_GONE[self.stages[0]]}; its payload is freed"

    @property
    def may(self) -> tuple[str, ...]:
        """The actions that an operator may take: requeue, drop."""
        return _MAY.get(self.record.get("stage", ""), ())

    @property
    def where(self) -> str:
        """Where it is, in words: "running on host7-1", "in batch train:7"."""
        record = self.record
        match record.get("stage"):
            case None:
                return self.stages[0]
            case "running":
                return f"running on {record['owner']}"
            case "taken":
                return f"in batch {record['batch']}"
            case "pool":
                made_by = f", made by weights {record['version']}" if record.get("version") else ""
                return record["status"] + made_by
            case "dead":
                return f"dead: {headline(self.letter['reason'], 200)}" if self.letter else "dead"
            case stage:
                return str(stage)

    def document(self, *, tokens: bool) -> dict[str, Any]:
        """Return the group as JSON; `tokens` adds ids, logprobs and masks.

        `members` is empty if the payload is freed and not logged.
        """
        document = {
            "gid": self.gid,
            "places": self.stages,
            "record": self.record or None,
            "dead_letter": self.letter,
            "trace_id": self.trace,
            "gone": self.gone,
            "may": self.may,
            "sampled": None,
            "members": [],
        }
        if self.sample:
            logged = {"step": self.sample["step"], "why": self.sample["why"]}
            return document | self.sample | {"sampled": logged}
        return document | (group_json(self.group, tokens) if self.group else {})


def locate(run: Run, gid: str) -> FoundGroup:
    """Locate a group without its payload. Raises ConfigError if unknown, AccountError if lost."""
    task, draw = split_group_id(gid)
    if task not in run.limits.tasks:
        raise ConfigError(
            f"run {run.name!r} has no task {task!r}",
            hint=f"its tasks: {', '.join(run.limits.tasks)}",
        )
    stages = run.account.stages(task, draw)
    record = run.record(gid)
    trace = trace_id(run.nonce, gid)
    if not record:
        return FoundGroup(gid, trace, [_end(run, gid, stages)])
    return FoundGroup(gid, trace, stages, record, run.dead_letters.reason(gid))


def find_group(
    run: Run, gid: str, samples: SampleLog | None = None, *, tokens: bool = False
) -> FoundGroup:
    """Return a group with its payload, or its sample if that is freed; raises as `locate`.

    `tokens`: the sample has its numbers by token.
    """
    found = locate(run, gid)
    if not found.record:
        return replace(found, sample=samples.find(gid, tokens=tokens) if samples else None)
    return replace(found, group=run.buffer.read(payload_of(gid, found.record)))


def _end(run: Run, gid: str, stages: list[str]) -> str:
    """Return how a group without a record ended; raises as `locate`."""
    task, draw = split_group_id(gid)
    if end := next((stage for stage in stages if stage in ENDS), None):
        return end
    counters = run.progress(task)
    if draw >= IMPORTED_FROM + sum(int(counters.get(how, 0)) for how in ("put", "imported")):
        raise ConfigError(
            f"{gid} has not been imported: draws from {IMPORTED_FROM} on are imported groups"
        )
    if IMPORTED_FROM > draw >= (cursor := run.jobs.cursor(task)):
        raise ConfigError(
            f"{gid} has not been started yet: the next draw of {task} is {cursor}",
            hint="see rolloutmq ls",
        )
    raise AccountError(
        f"{gid} was started, but is in no stage: it is lost",
        hint="rolloutmq fsck lists all such groups",
    )


_SHORT = ("task", "draw", "stage", "status", "lane", "owner", "batch", "tries", "aborts", "samples",
          "tokens", "version", "lineage", "reward", "payload", "chunks", "size", "crc")  # fmt: skip


def group_parts(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield what to print of a group, from its document (`FoundGroup.document`)."""
    where = " + ".join(document["places"]) or ("trained" if document["sampled"] else "lost")
    heading = Text.assemble((document["gid"], "bold"), "  ", state(where))
    yield heading.append(f" {document['gone']}" if document["gone"] else "")
    record = document["record"] or {}
    named = [(name, record[name]) for name in _SHORT if record.get(name)]
    if sampled := document["sampled"]:
        named.append(("step", f"{sampled['step']} (from the sample log: {sampled['why']})"))
    if trace := document["trace_id"]:
        named.append(("trace", trace))
    yield facts(named)
    if letter := document["dead_letter"]:
        worker = f" (worker {letter['worker']})" if letter.get("worker") else ""
        yield Text(f"dead letter{worker}: {letter['reason']}", style="red")
    if document["members"]:
        yield from _texts(document)


def _texts(document: Mapping[str, Any]) -> Iterator[RenderableType]:
    if document.get("prompt"):
        yield document["prompt"]
    for message in document.get("messages", []):
        yield Text(f"\n{message.get('role', '?')}:", style="bold")
        yield str(message.get("content", ""))
    if document.get("ground_truth") is not None:
        yield facts([("ground truth", str(document["ground_truth"]))])
    members = document["members"]
    if any(member["tokens"] for member in members):
        for member in members:
            yield from _rollout(member)
    else:
        what = f"\nnothing has been generated yet, of {len(members)} rollouts"
        yield Text(what, style="dim")


def _rollout(member: Mapping[str, Any]) -> Iterator[Text]:
    reward = member["reward"] or {}
    yield Text.assemble(
        (" ".join(filter(None, (f"\n#{member['index']}", member.get("role"), ""))), "bold"),
        state(member["status"]),
        (" score ", "dim"), known(reward.get("score"), "g"),
        (" · ", "dim"), f"{count(member['tokens'])} tokens",
        (" · finish ", "dim"), member["finish_reason"] or "-",
    )  # fmt: skip
    yield _version_bar(member)
    versions = {span["version"] for span in member["spans"]}
    style = version_style(versions.pop()) if len(versions) == 1 else ""
    text = Text()
    for turn in member.get("turns") or [{"trained": True, "text": member["response"]}]:
        # text that was not sampled (a tool's, say) is dim
        text.append(turn["text"], style=style if turn["trained"] else "dim")
    yield text if text.plain else Text("(no text)", style="dim")
    if others := {name: value for name, value in reward.items() if name != "score"}:
        said = ", ".join(f"{name} {value:g}" for name, value in others.items())
        yield Text(f"rewards {said}", style="dim")
    if feedback := member.get("feedback"):
        yield Text(f"judge: {feedback}", style="dim")
    if member["error"]:
        yield Text(member["error"], style="red")
    if "response_ids" in member:
        pairs = zip(member["response_ids"], member["logprobs"], strict=True)
        yield Text(" ".join(f"{token}({logprob:.2f})" for token, logprob in pairs), style="dim")


def _version_bar(member: Mapping[str, Any]) -> Text:
    """Draw each span as a coloured part, as long as its share of all tokens, sampled or not."""
    total = member["tokens"]
    if not total:
        return Text("no tokens", style="dim")
    spans = [VersionSpan(**span) for span in member["spans"]]
    text = Text()
    for span in spans:
        width = max(1, round(span.length / total * 40))
        text.append("▇" * width, style=version_style(span.version))
    for span in spans:
        where = f" {span.start}-{span.start + span.length - 1}" if len(spans) > 1 else ""
        text.append(f"  v{span.version}{where}", style=version_style(span.version))
    lineages = ", ".join(sorted({span.lineage for span in spans}))
    return text.append(f"  lineage {lineages}" if lineages else "", style="dim")
