"""Arguments of the command line: a parser whose errors name the option, and kinds of values."""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from zsim.errors import ArgumentError, ScenarioError, ZsimError, shown
from zsim.runs.compare.aspects import ASPECTS

if TYPE_CHECKING:
    from zsim.cluster.testbed import Layout

OPTIONS = {
    "ranks": "--ranks", "all_ranks": "--all-ranks", "interpreter": "--interpreter",
    "timeout_s": "--timeout", "backend": "--backend", "against": "--against",
    "module": "--module", "testbed": "--testbed", "cluster": "--cluster", "require": "--require",
    "numerics": "--numerics", "device": "--device", "seeds": "--seeds", "nodes": "--nodes",
    "micro_batches": "--micro-batch", "global_batch": "--global-batch", "tokens": "--tokens",
    "days": "--days", "price": "--price", "budget": "--budget", "vary": "--vary",
    "workers": "--workers",
}
"""Options of the command line, by the names of arguments in Python."""
_ARGUMENT = re.compile(
    rf"^({'|'.join(OPTIONS)})(?=:)|(?<![\w/.-])(all_ranks|timeout_s)(?![\w/.-])"
)
"""An argument's name: before the colon, or one that is no word of any other sentence."""
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
    """Parser whose errors are ours: one object where JSON was asked for, with the word that may
    have been meant."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        if refused := _OF_AN_ARGUMENT.fullmatch(message):
            name = refused["name"]
            where = self.prog if "|" in name else name
            if refused["wrong"]:
                choices = [choice.strip("' ") for choice in refused["choices"].split(",")]
                raise ArgumentsError(
                    where=where, expected=f"one of {', '.join(choices)}", found=refused["wrong"],
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


def read(top: Parser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments by name; ArgumentsError in the words of the command that does not know them."""
    options, unknown = top.parse_known_args(arguments)
    if unknown:
        commands = top.commands()
        command, option = commands[options.command], unknown[0].partition("=")[0]
        owners = [name for name, other in commands.items() if option in other.names()]
        remedy = (
            "one at a time" if options.command in owners
            else f"it is an option of {', '.join(owners)}" if owners
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


def with_options(error: ZsimError) -> str:
    """The text of `error`, with options in place of the names of Python's arguments."""
    if isinstance(error, ScenarioError):
        return str(error)
    return _ARGUMENT.sub(lambda match: OPTIONS[match[0]], str(error))


def json_option(command: argparse.ArgumentParser) -> None:
    """Add --json to `command`."""
    command.add_argument("--json", action="store_true", help="one JSON object on standard "
                                                             "output, nothing else there")


def verbose_option(command: argparse.ArgumentParser) -> None:
    """Add --verbose to `command`."""
    command.add_argument(
        "-v", "--verbose", action="store_true", help="sizes in bytes, not only in MiB and GiB"
    )


def setting(text: str) -> tuple[str, Any]:
    """A scenario's key and its value in TOML, as optimizer.clip_norm=1.0, or a variable in
    capitals; text needs no quotes."""
    import tomllib  # --help is to be quick

    key, equals, value = text[:1000].partition("=")
    if not equals or not ("." in key or key.isupper()):
        raise argparse.ArgumentTypeError(
            f"expected KEY=VALUE, as optimizer.clip_norm=1.0, found {text[:40]!r}"
        )
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return key.strip(), value.strip()


def path(text: str) -> str:
    """A path, which is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("expected a path, found nothing")
    return text


def layout(text: str) -> Layout:
    """The hosts and links of a testbed."""
    from zsim.cluster import testbed  # --help is to be quick

    try:
        return testbed.layout(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(
            f"expected {error.expected}, found {error.found!r}"
        ) from None


def ranks(text: str) -> tuple[int, ...]:
    """Ranks, as 0,7."""
    parts = text.split(",")
    if len(text) > 10_000 or not all(
        part.strip().isascii() and part.strip().isdigit() for part in parts
    ):
        raise argparse.ArgumentTypeError(f"expected ranks as 0,7, found {text[:40]!r}")
    return tuple(int(part[:12]) for part in parts)


def names(text: str) -> tuple[str, ...]:
    """Names, each once, as one-unit,idle-keys."""
    return tuple(dict.fromkeys(part.strip() for part in text[:1000].split(",")))


def aspects(text: str) -> tuple[str, ...]:
    """Aspects of a comparison, each once."""
    chosen = tuple(dict.fromkeys(part.strip() for part in text[:200].split(",")))
    if unknown := [name for name in chosen if name not in ASPECTS]:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(ASPECTS)}, found "
                                         f"{unknown[0][:40]!r}")
    return chosen


def world_size(text: str) -> int:
    """Ranks at work while the machine is measured."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= 64):
        raise argparse.ArgumentTypeError(f"expected 1 to 64 ranks, found {text[:40]!r}")
    return int(text)


def some_ranks(text: str) -> int:
    """A number of ranks that load a checkpoint."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:8]) <= 100_000):
        raise argparse.ArgumentTypeError(f"expected 1 to 100,000 ranks, found {text[:40]!r}")
    return int(text)


def count(text: str) -> int | str:
    """Number in `text`, or else `text` itself, as `seconds` does."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else text


def seconds(text: str) -> float | str:
    """Number in `text`, or else `text` itself. RunOptions refuses it as it does a number that does
    not fit."""
    try:
        return float(text)
    except ValueError:
        return text


def counts(text: str) -> tuple[int | str, ...]:
    """Numbers between commas, or the texts that are none, as `count` has them."""
    return tuple(count(part.strip()) for part in text.split(","))


number = seconds
"""Number of anything, or the text itself."""


def axes(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Values by dotted key, of texts such as "wrapping.every=1,2", whose values are as in TOML; a
    word is a string. ArgumentError for other texts."""
    made: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        try:
            made[key.strip()] = _toml_list(values)
        except (tomllib.TOMLDecodeError, RecursionError):
            equals = ""
        if not (equals and key.strip() and values.strip()):
            raise ArgumentError(
                where="--vary", expected="KEY=V1,V2 with values as in TOML", found=shown(text),
                remedy='for example --vary wrapping.every=1,2 or --vary offload.optimizer=cpu',
            )
    return made


def _toml_list(values: str) -> list[Any]:
    if re.fullmatch(r"\s*[A-Za-z_][\w-]*\s*(,\s*[A-Za-z_][\w-]*\s*)*", values):
        texts = [each.strip() for each in values.split(",")]
        return [{"true": True, "false": False}.get(text, text) for text in texts]
    made: list[Any] = tomllib.loads(f"values = [{values}]")["values"]
    return made
