"""A user's order policy is loaded on the worker's side."""

from __future__ import annotations

from pathlib import Path

import pytest

from buffer.errors import ConfigError
from buffer.groups.order_policy import Finished, load_order
from buffer.limits import ORDERS


def test_a_function_is_loaded_from_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_order_policy.py").write_text(
        "def longest_first(group):\n    return -group.longest\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    function = load_order(*["my_order_policy:longest_first"] * 2)
    assert function is not None
    assert function(Finished("math-0000000001", "math", 1, 2, 30, 20, 0.5, None)) == -20


@pytest.mark.parametrize("order", ORDERS)
def test_policies_of_the_buffer_need_no_function(order: str) -> None:
    assert load_order(order, "staleness") is None


def test_a_policy_that_is_not_there_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="order policy"):
        load_order(*["no_such_module_here:score"] * 2)


@pytest.mark.parametrize("named", ["", "staleness", "my_module:score"])
def test_code_that_only_the_server_names_is_not_imported(named: str) -> None:
    with pytest.raises(ConfigError, match="was not configured with"):
        load_order("this:module_would_print_a_poem", named)
