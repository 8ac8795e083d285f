"""`rolloutmq cost`: where the sampled tokens of a run went, and what it has cost."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from buffer.control.events import currency_of
from buffer.errors import StoreUnavailable
from buffer.groups.verdicts import JudgeUse
from buffer.ledger.tokens import TokenAccount
from consumer.handle.step_log import read_steps
from rolloutmq.command_list import command
from rolloutmq.extensions.cost.meter import judge_use
from rolloutmq.options import Output, Target, or_folder
from rolloutmq.output import count, facts, table

SHARES = ("idle_workers", "idle_trainer", "never_trained")
WORDS = {
    "total": "so far", "step": "last step", "million_trained": "a million trained tokens",
    "next_100_steps": "next 100 steps", "idle_workers": "idle time of workers",
    "idle_trainer": "idle time of the trainer", "never_trained": "sampled, never trained",
}  # fmt: skip


def _of_folder(folder: Path, error: StoreUnavailable, **_: object) -> Output:
    found = _costs(folder)
    return Output({"cost": found, "error": error.message}, [_costs_shown(found)])


@command("cost", epilog="Example: rolloutmq cost --json | jq .cost.next_100_steps")
@or_folder(_of_folder)
def cost(target: Target) -> Output:
    """Show where the sampled tokens of a run went, and what it has cost.

    Every token that an engine sampled is in one row: what became of its group, or the stage in
    which it is (waiting, running, pool, taken). `prompt` are tokens that engines have read, `again`
    those of them that were read after an interruption. Costs are as of the newest train step;
    [cost] has the prices.
    """
    accounts = target.run.account.tokens()
    whole = TokenAccount.of_all([*accounts.values()])
    judges = judge_use(target.run)
    found = _costs(target.run_dir)
    document = {
        "tokens": {task: _json(each) for task, each in accounts.items()},
        "all": _json(whole),
        "judges": {task: asdict(use) for task, use in judges.items()},
        "cost": found,
    }
    shown: list[RenderableType] = [_tokens_shown(accounts, whole, judges), _costs_shown(found)]
    return Output(document, shown)


def _json(account: TokenAccount) -> dict[str, int]:
    sums = {"sampled": account.total, "prompt": account.prompt, "again": account.again}
    return {**account.table, **sums}


def _costs(folder: Path | None) -> dict[str, Any]:
    steps = [s for s in read_steps(folder) if "cost/total" in s.metrics]
    if not steps:
        return {}
    newest = steps[-1].metrics
    found = {name: newest[f"cost/{name}"] for name in WORDS if f"cost/{name}" in newest}
    return {"as_of_step": steps[-1].step, "currency": currency_of(newest), **found}


def _tokens_shown(
    accounts: dict[str, TokenAccount], whole: TokenAccount, judges: dict[str, JudgeUse]
) -> Table:
    columns = {**accounts, "all": whole} if len(accounts) > 1 else accounts
    uses = {**judges, "all": sum(judges.values(), JudgeUse())}
    used = [uses.get(task, JudgeUse()) for task in columns]
    each = columns.values()
    grid = table("tokens", *columns, "share", right=[*columns, "share"])
    for row, number in whole.table.items():
        if number:
            cells = (f"{account.table[row]:,}" for account in each)
            grid.add_row(row, *cells, f"{number / whole.total:.1%}")
    for label, numbers in {
        "sampled": [account.total for account in each],
        "prompt": [account.prompt for account in each],
        "again": [account.again for account in each],
        "judges read": [use.prompt_tokens for use in used],
        "judges wrote": [use.completion_tokens for use in used],
    }.items():
        if sum(numbers) or "judges" not in label:
            grid.add_row(label, *map("{:,}".format, numbers), "")
    return grid


def _costs_shown(found: dict[str, Any]) -> Table | str:
    if not found:
        return "no train step has reported what it cost yet"
    currency = f" {found['currency']}".rstrip()
    rows = [
        (label, f"{found[name]:.1%}" if name in SHARES else f"{found[name]:,.2f}{currency}")
        for name, label in WORDS.items()
        if name in found and (found["total"] or name in SHARES)
    ]
    prices = [] if found["total"] else [("prices", "[cost] of the config has none")]
    return facts([("as of step", count(found["as_of_step"])), *prices, *rows])
