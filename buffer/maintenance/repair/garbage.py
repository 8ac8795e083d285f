"""Payloads that nothing needs: listed as garbage, which is freed later, or deleted at once."""

from __future__ import annotations

import re

from buffer.ids import IMPORTED_FROM, split_group_id
from buffer.maintenance.repair.accounts import archived_lines
from buffer.maintenance.repair.records import is_group
from buffer.maintenance.repair.state import Rebuilt

_ENTRY = re.compile(r"\S+ \S+ \d+")

Name = tuple[str, str]
"""Gid and token."""


def garbage(state: Rebuilt) -> set[str]:
    """Return the payloads that are listed as garbage, and those that nothing names.

    Prompts of draws that have not entered are not: they would be freed after they are written
    again.
    """
    used = {_name(line) for line in archived_lines(state)}
    for gid, record in state.records.items():
        used |= {(gid, "init"), (gid, record["payload"])}
    listed = {line for line in state.image.members("garbage") if _ENTRY.fullmatch(line)}
    kept = {line for line in listed if not (_name(line) in used or _is_ahead(state, _name(line)))}
    others = {line for line in state.image.members("unpinned") if _ENTRY.fullmatch(line)}
    named = used | {_name(line) for line in kept | others}
    for name, payload in state.image.payloads.items():
        if not (name in named or payload.expires or _is_ahead(state, name) or " " in "".join(name)):
            kept.add(f"{name[0]} {name[1]} {max(1, payload.chunks)}")
    return kept


def prompts_ahead(state: Rebuilt) -> list[str]:
    """Return the groups that are stored, but have not entered, or will enter again."""
    return sorted(
        name[0]
        for name, payload in state.image.payloads.items()
        if not payload.expires and _is_ahead(state, name)
    )


def _is_ahead(state: Rebuilt, name: Name) -> bool:
    gid, token = name
    if token != "init" or not is_group(gid, state.limits) or gid in state.records:
        return False
    task, draw = split_group_id(gid)
    return draw < IMPORTED_FROM and not state.is_ended(task, draw)


def _name(line: str) -> Name:
    gid, token, *_ = line.split(" ")
    return gid, token
