"""The draws of a task: each has a record or an end, or is drawn again (I1, I3).

A draw is a pure function of its number, so that the cursor can return to the first one that is
missing: the producer passes over those that exist. What was trained is never drawn again. If the
checkpoint is known, it says what that is; if not, and the count of archived groups says that one
of the missing was trained, none of them is drawn again.
"""

from __future__ import annotations

from buffer.ids import ENDS, IMPORTED_FROM, group_id, split_group_id
from buffer.maintenance.repair.batches import LEDGERS
from buffer.maintenance.repair.records import count, has_bytes, is_count
from buffer.maintenance.repair.state import Rebuilt


def settle_ends(state: Rebuilt) -> None:
    """Archive what was trained; a group that lives has no other end."""
    placed = _in_batches(state)
    for task, ends in state.ends.items():
        in_batches = {draw for name, draw in placed if name == task}
        if state.position is not None and task in state.limits.training_tasks:
            ends["archived"] = (
                state.trained(task) | ends["archived"] & _sliced(state, task)
            ) - in_batches
        ends["archived"] -= in_batches
        for draw in ends["archived"] & state.living(task):
            state.records.pop(group_id(task, draw))
            state.notes.append(f"{group_id(task, draw)} was trained, and ends")
        ends["filtered"] -= ends["archived"] | state.living(task)
        ends["dropped"] -= ends["archived"] | ends["filtered"] | state.living(task)


def _in_batches(state: Rebuilt) -> set[tuple[str, int]]:
    """Return the groups of batches, as (task, draw), without those that are archived already."""
    found = set[tuple[str, int]]()
    for ledger in LEDGERS:
        done = count(state.ledgers[ledger].get("slice"))
        for place, (_, (_, *lines)) in enumerate(sorted(state.batches[ledger].items())):
            skipped = done if place == 0 else 0
            found.update(split_group_id(line.partition(" ")[0]) for line in lines[skipped:])
    return found


def _sliced(state: Rebuilt, task: str) -> set[int]:
    """Return the draws of a task that are archived although their batch is not, as a whole."""
    done = count(state.ledgers["train"].get("slice"))
    batches = sorted(state.batches["train"].items())
    lines = batches[0][1][1 : 1 + done] if batches else []
    pairs = [split_group_id(line.partition(" ")[0]) for line in lines]
    return {draw for name, draw in pairs if name == task}


def lose_unusable(state: Rebuilt) -> None:
    """Let groups be drawn again whose record is of no use, or whose bytes are gone.

    A trainer replaces those of its batches by itself. A dead group may have failed for this reason.
    """
    for gid in state.unusable:
        task, draw = split_group_id(gid)
        if gid not in state.records and not state.is_ended(task, draw):
            state.lose(task, draw)
    for gid, record in list(state.records.items()):
        if record["stage"] == "taken" or has_bytes(gid, record, state.image.payloads):
            continue
        state.lose(record["task"], int(record["draw"]))


def close_what_cannot_return(state: Rebuilt) -> None:
    """End the missing draws that ended before, or may have been trained; lose all others."""
    for task in state.limits.tasks:
        counters = state.image.hash(f"progress:{task}")
        existing = state.living(task).union(*state.ends[task].values())
        cursor = _cursor(state, task)
        missing = [draw for draw in range(cursor) if draw not in existing]
        known = {gid for gid in state.lost if split_group_id(gid)[0] == task}
        unknown = [draw for draw in missing if group_id(task, draw) not in known]
        end, is_counted = _end_of(state, task, counters, len(unknown))
        for draw in unknown:
            if is_counted:
                state.ends[task][end].add(draw)
            elif end:
                state.close(task, draw, end)
            else:
                state.lose(task, draw)
        if is_counted:
            state.notes.append(f"{len(unknown)} groups of {task} are {end} again, as counted")
        outside = sorted(draw - IMPORTED_FROM for draw in existing if draw >= IMPORTED_FROM)
        for number in sorted(set(range(outside[-1] + 1 if outside else 0)) - set(outside)):
            state.close(task, IMPORTED_FROM + number, "dropped")


def _cursor(state: Rebuilt, task: str) -> int:
    """Return the draw before which all have entered: the two copies of the cursor, if they agree.

    If not, one of them is wrong: then it is the lower one, or one past all that exists.
    """
    copies = [state.image.hash("cursors"), state.image.hash(f"progress:{task}")]
    numbers = [copies[0].get(task), copies[1].get("cursor")]
    believed = [int(number) for number in numbers if number is not None and is_count(number)]
    seen = state.position.cursors.get(task, 0) if state.position else 0
    if len(believed) == 2 and believed[0] == believed[1]:
        return max(believed[0], seen)
    existing = state.living(task).union(*state.ends[task].values())
    drawn = [draw for draw in existing if draw < IMPORTED_FROM]
    return max([*sorted(believed)[:1], max(drawn, default=-1) + 1, seen])


def _end_of(state: Rebuilt, task: str, counters: dict[str, str], missing: int) -> tuple[str, bool]:
    """Return the end of draws of which no trace is left, and whether the account has counted it.

    The end is "" where they are drawn again.
    """
    short = {
        end: max(0, count(counters.get(end)) - len(state.ends[task][end]))
        for end in ENDS
        if not (end == "archived" and _knows_trained(state, task))
    }
    ended = [end for end, number in short.items() if number]
    if missing and sum(short.values()) == missing:
        return ended[0] if len(ended) == 1 else "dropped", True
    has_count = is_count(counters.get("archived"))
    was_trained = short.get("archived") or (
        "archived" in short and not has_count and count(state.ledgers["train"].get("freed"))
    )
    return "dropped" if was_trained and task in state.limits.training_tasks else "", False


def _knows_trained(state: Rebuilt, task: str) -> bool:
    return state.position is not None and task in state.limits.training_tasks
