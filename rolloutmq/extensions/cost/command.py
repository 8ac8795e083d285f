"""`rolloutmq cost`: where the sampled tokens of a run went, and what it has cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from buffer.control.events import currency_of
from buffer.errors import StoreUnavailable
from buffer.groups.verdicts import JudgeUse
from buffer.ledger.tokens import TokenAccount
from consumer.handle.step_log import read_steps
from rolloutmq.command_list import command
from rolloutmq.extensions.cost.meter import judge_use
from rolloutmq.options import Output, Target, or_folder
from rolloutmq.output import count, facts, money, table

BESIDE = ("sampled", "prompt", "again", "judge_prompt", "judge_completion")
SHARES = ("idle_workers", "idle_trainer", "never_trained")
WORDS = {
    "total": "so far", "step": "last step", "million_trained": "per million trained tokens",
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
    those of them that were read after an interruption, and `judge_…` tokens of judges by a language
    model. Costs are as of the newest train step; [cost] has the prices.
    """
    accounts, uses = target.run.account.tokens(), judge_use(target.run)
    numbers = {task: _numbers(each, uses.get(task, JudgeUse())) for task, each in accounts.items()}
    whole = _numbers(sum(accounts.values(), TokenAccount()), sum(uses.values(), JudgeUse()))
    found = _costs(target.run_dir)
    document = {"tokens": numbers, "all": whole, "cost": found}
    return Output(document, [_tokens_shown(numbers, whole), _costs_shown(found)])


def _numbers(account: TokenAccount, judges: JudgeUse) -> dict[str, int]:
    """Return the rows of an account, and then what is in none."""
    beside = (account.total, account.prompt, account.again)
    numbers = (*beside, judges.prompt_tokens, judges.completion_tokens)
    return {**account.table, **dict(zip(BESIDE, numbers, strict=True))}


def _costs(folder: Path | None) -> dict[str, Any]:
    steps = [s for s in read_steps(folder) if "cost/total" in s.metrics]
    if not steps:
        return {}
    newest = steps[-1].metrics
    found = {name: newest[f"cost/{name}"] for name in WORDS if f"cost/{name}" in newest}
    return {"as_of_step": steps[-1].step, "currency": currency_of(newest), **found}


def _tokens_shown(numbers: dict[str, dict[str, int]], whole: dict[str, int]) -> Table:
    columns = {**numbers, "all": whole} if len(numbers) > 1 else numbers
    grid = table("tokens", *columns, "share", right=[*columns, "share"])
    for row, number in whole.items():
        if number:
            cells = (f"{each[row]:,}" for each in columns.values())
            grid.add_row(row, *cells, "" if row in BESIDE else f"{number / whole['sampled']:.1%}")
    return grid


def _costs_shown(found: dict[str, Any]) -> Table | str:
    if not found:
        return "no train step has reported what it cost yet"
    currency = f" {found['currency']}".rstrip()
    rows = [
        (label, f"{found[name]:.1%}" if name in SHARES else f"{money(found[name])}{currency}")
        for name, label in WORDS.items()
        if name in found and (found["total"] or name in SHARES)
    ]
    prices = [] if found["total"] else [("prices", "[cost] of the config has none")]
    return facts([("as of step", count(found["as_of_step"])), *prices, *rows])
