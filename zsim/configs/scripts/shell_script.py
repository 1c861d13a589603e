"""The lines of a shell script that would run, with the values of its variables put in: text is
read, and nothing is executed.

Conditions over known values choose their branch. Where a condition is open, both branches are read:
it is of a command, or of a variable without a value.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

MAX_VALUE = 200
"""Longest value of a variable or an argument, in characters; what is longer is cut."""
_ASSIGNED = re.compile(
    r"[ \t]*(?:export[ \t]+|declare[ \t]+-\w+[ \t]+)?([A-Za-z_]\w{0,80})="
    r"(\"[^\"]*\"|'[^']*'|[^\s(;\"'][^\s(;]*|[\"'](?=[ \t]*$))"
)
"""A variable and its value: quoted on its line, a word, or the quote that opens more lines."""
_VARIABLE = re.compile(r"\$\{?([A-Za-z0-9_]{1,80})(?::?-([^}$]{0,80}))?\}?")
_NUMBERS = re.compile(r"\$\(\(([^$;\"']{1,120})\)\)")
_IF = re.compile(r"\s*(el)?if\b(.*?);?\s*then\s*$")
_BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}
_TESTS: Mapping[str, Callable[[str, str], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne,
    "-eq": lambda a, b: int(a) == int(b), "-ne": lambda a, b: int(a) != int(b),
    "-gt": lambda a, b: int(a) > int(b), "-ge": lambda a, b: int(a) >= int(b),
    "-lt": lambda a, b: int(a) < int(b), "-le": lambda a, b: int(a) <= int(b),
}


@dataclass(slots=True)
class _Branch:
    """The branch in reading: `taken` or not, None if undecided; `before`: an earlier one was."""

    taken: bool | None
    before: bool | None = False

    def turn(self, condition: bool | None) -> None:
        """Go on to the branch behind elif or else."""
        self.before = _either(self.before, self.taken)
        self.taken = False if self.before else condition if self.before is False else (
            False if condition is False else None
        )


def lines_of(text: str, variables: Mapping[str, str], undecided: list[str]) -> Iterator[str]:
    """Each line that would run, filled with `variables` and those that the script assigns.

    The conditions of branches that are both read are added to `undecided`.
    """
    text = re.sub(r"(^|[ \t])#.*$", r"\1", text.replace("\\\n", " \n"), flags=re.MULTILINE)
    text = re.sub(r"[;\n]\s*then\b", "; then\n", text)
    text = re.sub(r";\s*(?=(?:else|fi)\b|[A-Za-z_]\w*=)", "\n", text)
    text = re.sub(r"^(\s*else)[ \t]+", r"\1\n", text, flags=re.MULTILINE)
    known: dict[str, str | None] = dict(variables)
    branches: list[_Branch] = []
    for line in filter(str.strip, text.splitlines()):
        word = line.strip().rstrip(";")
        if branching := _IF.match(line):
            condition = _condition(_filled(branching[2], known))
            if condition is None and all(branch.taken is not False for branch in branches):
                undecided.append(branching[2].strip())
            if branching[1] and branches:
                branches[-1].turn(condition)
            else:
                branches.append(_Branch(condition))
        elif re.match(r"case\b.*\bin$", word):
            branches.append(_Branch(None))
        elif word == "else" and branches:
            branches[-1].turn(True)
        elif word in ("fi", "esac") and branches:
            branches.pop()
        elif all(branch.taken is not False for branch in branches):
            filled = _filled(line, known)
            _assign(filled, known, variables, sure=all(branch.taken for branch in branches))
            yield filled


def _assign(
    line: str, known: dict[str, str | None], variables: Mapping[str, str], *, sure: bool
) -> None:
    """Take over what `line` assigns. The value of a command is not known, nor one that only a
    branch that may run changes."""
    assigned = _ASSIGNED.match(line)
    if assigned is None or assigned[1] in variables:
        return
    name, value = assigned[1], assigned[2].strip("\"'")
    if value.lstrip().startswith("--"):  # arguments, which are read where they stand
        value = ""
    is_open = "$" in value or "`" in value or not (sure or known.get(name, value) == value)
    known[name] = None if is_open else value[:MAX_VALUE]


def _filled(text: str, known: Mapping[str, str | None]) -> str:
    """`text` with the values of variables, and arithmetic of whole numbers, put in."""

    def value(match: re.Match[str]) -> str:
        filled = known.get(match[1], match[2])
        return match[0] if filled is None else filled

    def number(match: re.Match[str]) -> str:
        formula = re.sub(r"\b[A-Za-z_]\w*", lambda name: known.get(name[0]) or name[0], match[1])
        try:
            return str(_number(ast.parse(formula.strip().replace("/", "//"), mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, KeyError):
            return match[0]

    return _NUMBERS.sub(number, _VARIABLE.sub(value, text))


def _number(node: ast.expr) -> int:
    """Value of an arithmetic expression of whole numbers; ValueError or KeyError for another."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if not isinstance(node, ast.BinOp):
        raise ValueError("no arithmetic of whole numbers")
    return _BINARY[type(node.op)](_number(node.left), _number(node.right))


def _condition(text: str) -> bool | None:
    """Truth of a condition of tests of values; None where it is another, or has a variable."""
    truth: bool | None = None
    for index, part in enumerate(re.split(r"(&&|\|\|)", text)):
        if index % 2:
            joint = part
        elif index == 0:
            truth = _test(part)
        elif joint == "||":
            truth = _either(truth, _test(part))
        else:
            truth = _not(_either(_not(truth), _not(_test(part))))
    return truth


def _test(text: str) -> bool | None:
    """Truth of one test, as [ "$A" -eq 1 ]."""
    try:
        terms = [term for term in shlex.split(text) if term not in ("[", "]", "[[", "]]", "test")]
        if terms[:1] == ["!"]:
            return _not(_test(shlex.join(terms[1:])))
        if any("$" in term for term in terms):
            return None
        if len(terms) == 2 and terms[0] in ("-z", "-n"):
            return (terms[1] == "") is (terms[0] == "-z")
        return _TESTS[terms[1]](terms[0], terms[2]) if len(terms) == 3 else None
    except (ValueError, KeyError):
        return None


def _not(truth: bool | None) -> bool | None:
    return None if truth is None else not truth


def _either(first: bool | None, second: bool | None) -> bool | None:
    return True if first or second else None if None in (first, second) else False
