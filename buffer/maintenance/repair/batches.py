"""The batches of a ledger, from manifests, records of taken groups, and the checkpoint (I5, I6).

Manifest and records say the same twice. Where the manifest of a step is gone, the checkpoint may
have it, line by line; if not, its groups say in which batch they are: then the batch becomes a new
revision, in another order. A step of which nothing is left cannot be delivered: if it was trained,
neither can those before it, which are archived; if not, those after it are dissolved.
"""

from __future__ import annotations

import re
from collections import defaultdict

from buffer.ledger.position import Position
from buffer.maintenance.repair.image import Hash
from buffer.maintenance.repair.records import count, is_count, is_group, is_stored
from buffer.maintenance.repair.state import Rebuilt
from buffer.model.ids import split_group_id
from buffer.model.manifest import ManifestEntry

LEDGERS = ("train", "eval")

_ARCHIVED = " archived_ms="
_REVISION = re.compile(r" revision=(\d+)")


class LedgerRepair:
    """Rebuilds one ledger: its fields, its batches, and the records of their groups."""

    def __init__(self, state: Rebuilt, name: str) -> None:
        self._state = state
        self._name = name
        self._fields = state.image.hash(f"ledger:{name}")
        self._position = (state.position if name == "train" else None) or Position()
        self._lines = self._manifests()
        self._members = self._members_by_record()
        self._placed: set[str] = set()

    def run(self) -> None:
        """Decide the steps that can be delivered; then set records, lines and counters."""
        first, last = self._range()
        batches = dict[int, list[str]]()
        sliced = 0
        for step in range(first, last + 1):
            lines = self._known(step) or self._recorded(step)
            sliced = self._archived_part(lines) if step == first else sliced
            skip = sliced if step == first else 0
            left = lines[1 + skip :]
            if step <= self._trained_to and not (
                skip + len(left) and all(map(self._is_stored, left))
            ):
                self._archive(batches | {step: lines})
                batches.clear()
                first, sliced = step + 1, 0
                continue
            kept = [line for line in left if self._claim(line, step)]
            if not kept and not skip:
                last = step - 1
                break
            batches[step] = self._revised(step, lines, skip, kept)
        self._state.batches[self._name] = batches
        self._set_fields(first - 1, max(last, first - 1), sliced)

    # -- what is there ---------------------------------------------------------------------------

    def _manifests(self) -> dict[int, list[str]]:
        """Return the lines of all manifests, without those that cannot be read."""
        found = {}
        for text in self._state.image.below(f"batch:{self._name}:"):
            header, *lines = self._state.image.lines(f"batch:{self._name}:{text}") or [""]
            if not is_count(text) or str(int(text)) != text:
                continue
            if not header.startswith(f"step={text} "):
                header, lines = "", [header, *lines]
            kept = [line for line in lines if self._entry(line)]
            if header or kept:
                found[int(text)] = [header, *kept]
        return found

    def _entry(self, line: str) -> ManifestEntry | None:
        try:
            entry = ManifestEntry.parse(line)
        except ValueError:
            return None
        return entry if is_group(entry.gid, self._state.limits) else None

    def _members_by_record(self) -> dict[int, list[str]]:
        """Return the groups that say in which batch they are, and that no manifest lists."""
        listed = {line.partition(" ")[0] for _, *lines in self._lines.values() for line in lines}
        freed = min(count(self._fields.get("freed")), self._trained_to)
        members = defaultdict[int, list[str]](list)
        for gid, record in self._state.records.items():
            ledger, _, step = record.get("batch", "").partition(":")
            is_in = record["stage"] == "taken" and ledger == self._name and is_count(step)
            if is_in and gid not in listed and int(step) > freed:
                members[int(step)].append(gid)
        return members

    # -- which steps -----------------------------------------------------------------------------

    @property
    def _trained_to(self) -> int:
        """The newest step that a checkpoint holds."""
        known = self._state.position is not None and self._name == "train"
        return self._position.step if known else count(self._fields.get("committed"))

    def _is_archived(self, step: int) -> bool:
        header, *lines = self._lines[step]
        if _ARCHIVED in header:
            return True
        gids = [line.partition(" ")[0] for line in lines]
        # a header that was replaced: nothing of it lives
        return bool(gids) and all(
            gid not in self._state.records and self._has_archived(gid) for gid in gids
        )

    def _has_archived(self, gid: str) -> bool:
        task, draw = split_group_id(gid)
        return draw in self._state.ends[task]["archived"]

    def _range(self) -> tuple[int, int]:
        """Return the first and the last step of the batches that are not archived."""
        archived = {step for step in self._lines if self._is_archived(step)}
        live = {step for step in self._lines if step not in archived}
        live |= {step for step in self._members if step not in archived}
        freed = max([count(self._fields.get("freed")), *archived])
        if self._state.position is not None and self._name == "train":
            freed = min(freed, self._position.step)
        first = min(live) if live else freed + 1
        if not is_count(self._fields.get("freed")) and not live and not archived:
            first = self._trained_to + 1
        while first - 1 > freed and self._can_restore(first - 1):
            first -= 1
        last = max(live) if live else first - 1
        while self._can_restore(last + 1):
            last += 1
        return first, last

    def _can_restore(self, step: int) -> bool:
        """Return whether the checkpoint has the manifest of a step, and the server its bytes."""
        lines = self._position.batches.get(step, [])[1:]
        return bool(lines) and all(map(self._is_stored, lines))

    def _is_stored(self, line: str) -> bool:
        """Return whether the bytes of a line exist, as many as it says."""
        entry = self._entry(line)
        if entry is None:
            return False
        ref = entry.payload
        size = (str(ref.chunks), str(ref.size))
        return is_stored(entry.gid, ref.token, *size, self._state.image.payloads)

    # -- one step --------------------------------------------------------------------------------

    def _known(self, step: int) -> list[str]:
        """Return the lines that the checkpoint has of a step."""
        lines = self._position.batches.get(step, [])
        if not lines or step > self._trained_to:
            return []
        header = self._lines.get(step, [""])[0]
        return [header or lines[0], *lines[1:]]

    def _recorded(self, step: int) -> list[str]:
        """Return the lines of a manifest, and of groups that say that they are in it."""
        header, *lines = self._lines.get(step, [""])
        listed = {line.partition(" ")[0] for line in lines}
        missing = sorted(set(self._members.get(step, [])) - listed)
        return [header, *lines, *(self._line(gid) for gid in missing)]

    def _line(self, gid: str) -> str:
        record = self._state.records[gid]
        names = ("payload", "chunks", "size", "crc", "samples", "version")
        return " ".join([gid, *(record.get(name) or "-" for name in names)])

    def _archived_part(self, lines: list[str]) -> int:
        """Return how many groups at the head of a batch are archived already."""
        gids = [line.partition(" ")[0] for line in lines[1:]]
        done = 0
        while (
            done < len(gids)
            and gids[done] not in self._state.records
            and self._has_archived(gids[done])
        ):
            done += 1
        return done

    def _claim(self, line: str, step: int) -> bool:
        """Put the group of a line into the batch of a step; return False if it cannot be in it."""
        entry = self._entry(line)
        if entry is None or entry.gid in self._placed:
            return False
        gid = entry.gid
        is_new = step > self._trained_to
        if is_new and (self._state.is_trained(gid) or self._has_archived(gid)):
            return False
        if not self._is_stored(line):
            self._state.lose(*split_group_id(gid))
            return False
        self._placed.add(gid)
        record = self._state.records.get(gid) or self._new_record(gid)
        self._state.records[gid] = self._taken(entry, record, step)
        return True

    def _taken(self, entry: ManifestEntry, record: Hash, step: int) -> Hash:
        ref = entry.payload
        version = "" if entry.version is None else str(entry.version)
        gone = ("token", "lane", "entry", "claimed_ms") if record["stage"] != "taken" else ()
        kept = {name: value for name, value in record.items() if name not in gone}
        return {"lineage": "", **kept} | {
            "stage": "taken",
            "status": "completed",
            "batch": f"{self._name}:{step}",
            "payload": ref.token,
            "chunks": str(ref.chunks),
            "size": str(ref.size),
            "crc": ref.crc,
            "samples": str(entry.samples),
            "version": version,
        }

    def _new_record(self, gid: str) -> Hash:
        task, draw = split_group_id(gid)
        prompt = self._state.image.payloads.get((gid, "init"))
        size = str(prompt.size if prompt else 0)
        facts = {"task": task, "draw": str(draw), "prompt": size, "lineage": "", "stage": ""}
        return facts | {"tries": "0", "aborts": "0"}

    def _revised(self, step: int, lines: list[str], sliced: int, kept: list[str]) -> list[str]:
        """Return a manifest; it is a new revision where it is not the one that was recorded.

        The slots of groups that are lost are open, as if these were quarantined (quarantine.lua).
        """
        header, *old = lines
        whole = [*old[:sliced], *kept]
        known = self._state.image.lines(f"batch:{self._name}:{step}")
        if header and whole == (self._position.batches.get(step) or known)[1:]:
            return [header, *whole]
        notes = [":".join([*line.split(" ")[:2], "-"]) for line in old if line not in whole]
        revision = _REVISION.search(header)
        number = int(revision[1]) + 1 if revision else 1
        header = (header or self._new_header(step, whole)).replace(" strict=1", " strict=0")
        if revision:
            header = ",".join([_REVISION.sub(f" revision={number}", header), *notes])
        else:
            header = f"{header} revision={number} quarantined={','.join(notes)}"
        self._state.notes.append(
            f"the batch of {self._name} step {step} becomes revision {number}, "
            f"with {len(whole)} groups"
        )
        return [header, *whole]

    def _new_header(self, step: int, lines: list[str]) -> str:
        """Return a header as `take_batch` writes it, of what can be known."""
        limits = self._state.limits
        groups = defaultdict[str, int](int)
        for line in lines:
            groups[split_group_id(line.partition(" ")[0])[0]] += 1
        thresholds = {task: limits.threshold(task) for task in groups}
        cuts = {task: "-inf" if t == "" else step - int(t) for task, t in thresholds.items()}
        header = f"step={step} cut={_joined(cuts)} asked={_joined(groups)} strict=0"
        header += f" order={limits.order} taken_ms={self._state.now_ms}"
        if self._name == "train" and limits.token_threshold is not None:
            forks = ",".join(self._state.image.lines("lineages")[-64:])
            header += f" tokens={limits.token_threshold} forks={forks}"
        return header

    # -- what is not delivered any more ------------------------------------------------------------

    def _archive(self, batches: dict[int, list[str]]) -> None:
        """Archive the groups of trained batches before a gap."""
        for step, (_, *lines) in batches.items():
            for line in lines:
                gid = line.partition(" ")[0]
                task, draw = split_group_id(gid)
                self._state.records.pop(gid, None)
                self._state.ends[task]["archived"].add(draw)
            self._state.notes.append(f"step {step} is archived: it cannot be delivered again")

    def _set_fields(self, freed: int, taken: int, sliced: int) -> None:
        """Set the counters of the ledger: those that are still possible are kept."""
        fields = self._fields
        committed = _between(fields.get("committed"), freed, taken, self._trained_to)
        keep = _between(fields.get("keep"), freed + bool(sliced), committed, freed)
        if sliced:
            keep = max(keep, freed + 1)
            committed = max(committed, keep)
        retained = {
            step: lines
            for step, lines in self._lines.items()
            if step <= freed and lines[0] and all(map(self._is_stored, lines[1:]))
        }
        self._state.archived[self._name] = retained
        forgotten = min(retained, default=freed + 1) - 1
        exported = _between(fields.get("exported"), 0, freed, 0)
        wanted = {
            "taken": taken,
            "committed": committed,
            "keep": keep,
            "freed": freed,
            "slice": sliced,
            "forgotten": forgotten,
            "exported": exported,
            "awaits": _between(fields.get("awaits"), 0, taken, 0),
        }
        self._state.ledgers[self._name] = _changed(fields, wanted)


def _changed(fields: Hash, wanted: dict[str, int]) -> Hash:
    """Return the fields with the wanted numbers; one that is missing counts as 0."""
    return {
        name: str(number)
        for name, number in wanted.items()
        if number or name in fields or name in ("taken", "committed", "freed")
    }


def _between(text: str | None, least: int, most: int, default: int) -> int:
    """Return a counter if it is possible, else the default within its bounds."""
    number = count(text, -1)
    return number if least <= number <= most else max(least, min(most, default))


def _joined(numbers: dict[str, object] | dict[str, int] | dict[str, str | int]) -> str:
    return ",".join(f"{task}={number}" for task, number in numbers.items())


def dissolve(state: Rebuilt) -> None:
    """Return the groups of batches that are not delivered any more to their pools."""
    listed = {
        line.partition(" ")[0]
        for batches in state.batches.values()
        for _, *lines in batches.values()
        for line in lines
    }
    left = [
        record
        for gid, record in state.records.items()
        if record["stage"] == "taken" and gid not in listed
    ]
    for record in left:
        record.pop("batch", None)
        record |= {"stage": "pool", "status": "completed"}
    if left:
        state.notes.append(f"{len(left)} groups of batches that are gone can be taken again")
