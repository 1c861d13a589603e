"""Kinds of values that options of the command line have, and errors in the words of options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zsim.errors import ArgumentError, ScenarioError, ZsimError, listed, shown
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


def with_options(error: ZsimError) -> str:
    """The text of `error`, with options in place of the names of Python's arguments."""
    if isinstance(error, ScenarioError):
        return str(error)
    return _ARGUMENT.sub(lambda match: OPTIONS[match[0]], str(error))


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
        raise argparse.ArgumentTypeError(f"expected some of {listed(ASPECTS, 'and')}, found "
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
        except (ValueError, RecursionError):
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
    import tomllib  # as above

    made: list[Any] = tomllib.loads(f"values = [{values}]")["values"]
    return made
