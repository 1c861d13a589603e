"""The argument parser: commands by name, and the options of those that are asked for.

`zsim --help` waits for no command's options, and a command's help for none of its work.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Sequence
from typing import NoReturn

from zsim.cli.options import COMMANDS
from zsim.errors import ZsimError, listed
from zsim.version import __version__

EPILOG = (
    "exit codes: 0 fine, 1 a verdict failed, 2 bad usage or bad scenario, 3 backend not available"
)
_OF_AN_ARGUMENT = re.compile(
    r"argument (?P<name>\S+): (?:expected (?P<expected>.*?)(?:, found (?P<found>.*))?"
    r"|invalid choice: (?P<wrong>.*) \(choose from (?P<choices>.*)\))",
    re.DOTALL,
)
"""argparse's message about the value of an argument, whose own part may be in our words."""


class ArgumentsError(ZsimError):
    """Arguments that cannot be read. Where nothing was expected, what is there says it all."""

    @property
    def complaint(self) -> str:
        """The error without its place."""
        if self.expected:
            return super().complaint
        return f"{self.found}; {self.remedy}" if self.remedy else self.found


class Parser(argparse.ArgumentParser):
    """Parser with zsim's own errors: with --json one object, with the nearest known word."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        if refused := _OF_AN_ARGUMENT.fullmatch(message):
            name = refused["name"]
            where = self.prog if "|" in name else name
            if refused["wrong"]:
                choices = [choice.strip("' ") for choice in refused["choices"].split(",")]
                raise ArgumentsError(
                    where=where, expected=listed(choices), found=refused["wrong"],
                    remedy=_meant(refused["wrong"].strip("'"), choices),
                )
            raise ArgumentsError(
                where=where, expected=refused["expected"], found=refused["found"] or "none"
            )
        self.refuse(message.replace("the following arguments are required: ", "missing "))

    def refuse(self, problem: str, *, remedy: str = "") -> NoReturn:
        """ArgumentsError for arguments of this command that cannot be read."""
        where = self.prog.partition(" ")[2] or "command line"
        raise ArgumentsError(
            where=where, expected="", found=problem,
            remedy=remedy or f"`{self.prog} --help` names what there is",
        )

    def commands(self) -> dict[str, Parser]:
        """The parsers of this one's commands, by name."""
        subparsers = [
            action for action in self._actions if isinstance(action, argparse._SubParsersAction)
        ]
        return {name: command for action in subparsers for name, command in action.choices.items()}

    def names(self) -> list[str]:
        """Every option and choice of this parser."""
        return [
            name for action in self._actions
            for name in (*action.option_strings, *(action.choices or ()))
        ]


def parser(names: Collection[str] = tuple(COMMANDS)) -> Parser:
    """The argument parser with every command; those not in `names` lack their options."""
    top = Parser(
        prog="zsim",
        description="Simulate a ZeRO or FSDP training step, run the same step for real, and "
                    "compare the two.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"zsim {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.help, allow_abbrev=False)
        if name in names:
            command.add_options(added)
            added.epilog = f"example: {command.example}"
    return top


def read(argv: Sequence[str]) -> argparse.Namespace:
    """The options in `argv`, and their `command`.

    ArgumentsError, in the words of the command, for an option that it does not know.
    """
    word = next((text for text in argv if not text.startswith("-")), "")
    options, unknown = parser((word,)).parse_known_args(argv)
    if unknown:
        commands = parser().commands()
        command, option = commands[options.command], unknown[0].partition("=")[0]
        owners = [name for name, other in commands.items() if option in other.names()]
        remedy = (
            "one at a time" if options.command in owners
            else f"an option of {listed(owners, 'and')}" if owners
            else _meant(option, command.names())
        )
        command.print_usage(sys.stderr)
        kind = "option" if option.startswith("-") else "argument"
        command.refuse(f"unknown {kind} {' '.join(unknown)}", remedy=remedy)
    return options


def _meant(word: str, names: Sequence[str]) -> str:
    """The question after the one of `names` that is nearest to `word`; empty where none is near."""
    # only where something is wrong: --help is to be quick
    from difflib import get_close_matches

    near = get_close_matches(word, names, n=1)
    return f"did you mean {near[0]}?" if near else ""
