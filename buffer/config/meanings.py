"""Read what the fields of a model mean: the strings under them.

pydantic would read them at every import, which takes a tenth of the start of each process.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from itertools import pairwise
from textwrap import dedent

from pydantic import BaseModel


@cache
def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the meaning of each field, on one line; "" where no string is under it."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            (tree,) = ast.parse(dedent(inspect.getsource(kind))).body
            for statement, below in pairwise([*ast.iter_child_nodes(tree), ast.Pass()]):
                match statement, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                        found[name] = " ".join(text.split())
                    case ast.AnnAssign(target=ast.Name(id=name)), _:
                        found[name] = ""
    return {name: found.get(name, "") for name in model.model_fields}
