"""torchtitan's Python config as a table: parsed, and never executed.

A function of the file is a recipe. Of it are read `return Trainer.Config(…)`, or a call of another
recipe and assignments to what it returned. Literals become values; calls become tables of their
keyword arguments; any other expression stays text, and is refused where it matters.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from zsim.configs.config_keys import ARGUMENTS, CALLED
from zsim.configs.documents import MAX_DEPTH, Config
from zsim.errors import ScenarioError, listed

STATEMENTS = "statements"
"""Key of a recipe's table: what of it is not executed."""
HARMLESS = (ast.Import, ast.ImportFrom, ast.Assert, ast.FunctionDef)
"""Statements that change no config by themselves."""


def python_config(text: str, *, where: str, recipe: str = "") -> Config:
    """The table of one recipe; ScenarioError that lists the recipes where none is chosen."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ScenarioError((f"{where}: not Python: {str(error)[:200]}",)) from None
    recipes = _recipes(tree)
    chosen = recipe or (next(iter(recipes)) if len(recipes) == 1 else "")
    if chosen not in recipes:
        raise ScenarioError((f"{where}: expected --recipe with {listed(recipes)[:2000]}, found "
                             f"{chosen or 'none'}",))
    try:
        return _Recipe(recipes, where).table(chosen, 0)
    except RecursionError:
        raise ScenarioError((f"{where}: {chosen}: expected fewer nested expressions",)) from None


def _recipes(tree: ast.Module) -> dict[str, Sequence[ast.stmt]]:
    """Statements of each function without arguments, and of each table at the top, by name."""
    recipes: dict[str, Sequence[ast.stmt]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.args.args:
            if any(isinstance(inner, ast.Return) and inner.value for inner in ast.walk(node)):
                recipes[node.name] = node.body
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target = node.targets[0]
            if isinstance(target, ast.Name):
                recipes[target.id] = [ast.Return(value=node.value)]
    return recipes


class _Recipe:
    """A reader of recipes, which may call one another."""

    def __init__(self, recipes: dict[str, Sequence[ast.stmt]], where: str) -> None:
        self.recipes, self.where = recipes, where

    def table(self, name: str, depth: int) -> Config:
        """The table that the recipe `name` returns."""
        if depth > MAX_DEPTH:
            raise ScenarioError((f"{self.where}: {name}: recipes that call one another in a ring",))
        values: dict[str, Any] = {}
        left: list[str] = []
        for statement in self.recipes[name]:
            match statement:
                case ast.Return(value=value) if value is not None:
                    made = self.value(value, values, depth)
                    if isinstance(made, dict):
                        return {
                            "recipe": name, **made, STATEMENTS: [*made.get(STATEMENTS, ()), *left]
                        }
                case ast.Assign(targets=[ast.Name(id=target)], value=value):
                    values[target] = self.value(value, values, depth)
                case ast.AnnAssign(target=ast.Name(id=target), value=value) if value is not None:
                    values[target] = self.value(value, values, depth)
                case ast.Assign(targets=[ast.Attribute() as target], value=value):
                    if not _assign(target, self.value(value, values, depth), values):
                        left.append(self._line(statement))
                case ast.Expr(value=ast.Constant()):
                    pass
                case _ if not isinstance(statement, HARMLESS):
                    left.append(self._line(statement))
        raise ScenarioError((f"{self.where}: {name}: expected a config that is returned, found "
                             "none",))

    def value(self, node: ast.expr, values: dict[str, Any], depth: int) -> Any:
        """The value of an expression, as far as it is literal."""
        match node:
            case ast.Name(id=name) if name in values:
                return values[name]
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]) if name in self.recipes:
                return self.table(name, depth + 1)
            case ast.Call(func=function):
                named = {k.arg: self.value(k.value, values, depth) for k in node.keywords if k.arg}
                arguments = [self.value(a, values, depth) for a in node.args]
                return {
                    **named, CALLED: ast.unparse(function),
                    **({ARGUMENTS: arguments} if arguments else {}),
                }
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item, values, depth) for item in items]
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return f"the expression {ast.unparse(node)[:80]}"

    @staticmethod
    def _line(statement: ast.stmt) -> str:
        return f"line {statement.lineno}: {ast.unparse(statement).splitlines()[0][:60]}"


def _assign(target: ast.Attribute, value: Any, values: dict[str, Any]) -> bool:
    """Set `name.key.key` in a table of `values`; False where there is no such table."""
    path: list[str] = []
    node: ast.expr = target
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    table = values.get(node.id) if isinstance(node, ast.Name) else None
    for part in reversed(path[1:]):
        table = table.setdefault(part, {}) if isinstance(table, dict) else None
    if not isinstance(table, dict):
        return False
    table[path[0]] = value
    return True
