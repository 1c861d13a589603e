"""What the words of a network say of its rate: how many ports, how fast each is, and whose they
are.

"3200 Gbps/node", "8x50 GB/s per node", "4 x 200G", "8xNDR400", "4x HDR100", "1x NDR400 per GPU",
"one HDR200 per 2 GPUs", "4x200". Bits and bytes by their letter; a bare G is gigabits, as NICs are
sold. The number behind a cable's name is the rate of its port: HDR100 and NDR200 are half of one
that is split. Words that contradict each other are named.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

CABLES: dict[str, float] = {"EDR": 12.5, "HDR": 25.0, "NDR": 50.0, "XDR": 100.0}
"""GB/s of an InfiniBand port by its name."""
SOLD = (25, 40, 50, 56, 100, 200, 400, 800, 1600)
"""Gbit/s of a port as NICs are sold: what a number without a unit may be."""
MOST_PORTS = 64
"""Of a node, where a number has no unit: twice as many as any has."""
_COUNTS = {"one": 1, "single": 1, "two": 2, "dual": 2, "four": 4, "quad": 4, "eight": 8}
_NODES = ("node", "host", "server", "instance", "machine")
_PORTS = r"(?:NIC|HCA|port|card|adapter|link|rail|cable)"
_KINDS = r"(?:bonded|ethernet|infiniband|ib|roce|rdma|efa|tcp|network|bandwidth)(?:[ ,]+(?:ethernet|rdma|network|bandwidth))*"  # noqa: E501
"""Words that may stand between a rate and whose it is."""
_RATE = r"(?<!\d)(\d{1,9}(?:\.\d{1,9})?)\s*(G|T)(B/s|b/s|bps|bit/s|bE|)(?![A-Za-z])"
_NAME = r"(?:EDR|HDR|NDR|XDR)"
_WORD = r"[A-Za-z][A-Za-z0-9\-]*\s+"
_MANY = re.compile(rf"(?<![\w\-])(\d{{1,4}})\s*x\s*({_WORD}|)(?:{_WORD})?{_RATE}", re.IGNORECASE)
_EACH_OF = re.compile(
    rf"(?<![\w\-])(\d{{1,3}})\s*(?:x\s*)?(?:{_WORD})?{_PORTS}s?\s+(?:of|at|with|@)\s+(?:{_WORD})?{_RATE}",
    re.IGNORECASE,
)
_EACH = re.compile(
    rf"(?<![\w\-])(\d{{1,3}})\s*(?:x\s*)?(?:{_WORD})?{_PORTS}s?\s*[,:]?\s*(?:{_WORD})?{_RATE}"
    rf"\s*(?:each\b|(?:/|per )\s*{_PORTS})",
    re.IGNORECASE,
)
_BEHIND = re.compile(rf"{_RATE}\)?\s*x\s*(\d{{1,2}})\b", re.IGNORECASE)
_CABLE = re.compile(
    r"(?:(?<![\w\-])(\d{1,2})\s*x\s*(?:[A-Za-z][A-Za-z0-9\-]*\s+)?|(?<![\w\-])(\d{1,2})\s*|(?<![A-Za-z]))"
    rf"({_NAME})(?:[ \-]?(\d{{2,4}})(?![\d.]|\s*[GT](?![A-Za-z]{{3}})))?(?:\s*\([^()]*\))?(?:\s*x\s*(\d{{1,2}})\b)?",  # noqa: E501
    re.IGNORECASE,
)
"""How many cables, before or behind their name, the name, and the rate of their ports, which has no
unit."""
_BARE = re.compile(
    r"(?<![\w\-.])(\d{1,4})\s*x\s*(\d{1,4})(?![\w.\-]|\s*(?:[GTM]i?b|nodes?\b|GPUs?\b|ranks?\b|x))",
    re.IGNORECASE,
)
_OWNER = r"(node|GPU|NIC|card|device|host|server|instance|machine|rank|port|HCA|adapter|rail)s?\b"
_FILLER = rf"(?:\s|\(|\)|{_KINDS}\b|{_NAME}(?:[ \-]?\d{{2,4}})?\b|{_RATE}|G\b|{_PORTS}s?\b)*+"
_WHOSE = re.compile(
    rf"{_FILLER}(?:/|\b(?:per|for each|for every|each|every)\b)\s*(?:each\s+)?(\d{{1,2}}\s*)?{_OWNER}",  # noqa: E501
    re.IGNORECASE,
)
_ONE = re.compile(
    rf"{_RATE}\s*(?:{_KINDS})?\s*(?:/|per|each)?\s*(?:(\d{{1,2}}\s*)?{_OWNER})?", re.IGNORECASE
)
_PORTS_OF = re.compile(
    rf"(?<![\w\-])(\d{{1,3}})\s*(?:x\s*)?{_PORTS}s?\s*(?:/|per|a|for each|for every)\s*(\d{{1,2}}\s*)?{_OWNER}",  # noqa: E501
    re.IGNORECASE,
)
_SHARED = re.compile(
    rf"(?<![\w\-])(\d{{1,2}})\s*GPUs?\s*(?:/|per|share|sharing|on)\s*(?:a |one |each |1 )?{_PORTS}\b"  # noqa: E501
    r"|(?<![\w\-])(\d)\s*:\s*1\s*GPUs?\s*:\s*NICs?", re.IGNORECASE,
)
"""GPUs that have one port together."""
AGREE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """GB/s, whose they are as words say it, a "node", each "gpu" or "nic", "" for none, whether a
    cable's name stands for them, and of how many ports they are, 0 where nobody says. `instead` is
    what the words say as well, and contradict."""

    gb_s: float
    whose: str
    is_cable: bool = False
    count: int = 0
    instead: float | None = None
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """GB/s of all NICs of a node together, what the words may mean of it as well, what they say
    instead, and what had to be assumed."""

    gb_s: float
    other: float | None = None
    instead: float | None = None
    assumed: tuple[str, ...] = ()


def taken(inter: str, *, per_node: int, most: float = 50.0) -> Taken | None:
    """What the words say of a node of `per_node` GPUs; None where they say no rate. `most` is what
    one GPU's slot can carry: a rate above it that belongs to nothing in particular is the node's,
    and of several ports that were said to be each GPU's, they are the node's.

    A rate or a cable that is nobody's is each GPU's or the only one; not so one that no NIC has.
    """
    said = _said(inter)
    if said is None:
        return None
    assumed, whose = said.assumed, said.whose
    if whose == "gpu" and said.count > 1 and said.gb_s > 2 * most:
        whose, assumed = "node", (*assumed, f"{8 * said.gb_s:g} Gbit/s as a node's, for no GPU "
                                            f"has a slot for them")
    of_all = whose == "node" or (not whose and not said.is_cable and said.gb_s > most)
    times = 1 if of_all else per_node
    other = said.gb_s * (per_node if of_all else 1)
    may_be = not whose and per_node > 1 and said.gb_s <= 2 * most
    instead = None if said.instead is None else said.instead * times
    return Taken(
        gb_s=said.gb_s * times, other=other if may_be else None, instead=instead, assumed=assumed
    )


def node_gb_s(inter: str, *, per_node: int, most: float = 50.0) -> float | None:
    """GB/s of all NICs of a node together, as `taken` has it; None where the words do not say."""
    found = taken(inter, per_node=per_node, most=most)
    return found.gb_s if found else None


def without_thousands(words: str) -> str:
    """"3,200 Gbps" as "3200 Gbps"; a comma before a blank parts words."""
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", words)


def _said(inter: str) -> Said | None:
    text = _counted(without_thousands(inter).replace("×", "x").replace("*", "x"))
    named = _cable_of(text)
    found = _several(text, named) or _cables(text, named) or _single(text)
    return _shared(text, found) if found else None


def _counted(text: str) -> str:
    """The text with counts in words as figures: "one HDR200" and "quad-rail HDR"."""
    text = re.sub(
        r"\b(\d{1,2})\+1\s*x", r"\1 x", text, flags=re.IGNORECASE
    )  # the one is of the storage
    twice = r"\b(\d{1,2})\s*x\s*\(?\s*(\d{1,2})\s*x(?=\s*[\d.]+\s*[GT])"
    text = re.sub(twice, lambda both: f"{int(both[1]) * int(both[2])} x", text, flags=re.IGNORECASE)
    text = re.sub(
        r"\b(single|dual|two|quad|four|eight)[- ]rail\b",
        lambda one: f"{_COUNTS[one[1].lower()]} x", text, flags=re.IGNORECASE,
    )
    before = rf"\b(one|single|two|dual|four|quad|eight)\b(?=\s+(?:\d|{_NAME}|{_PORTS}))"
    return re.sub(before, lambda one: f"{_COUNTS[one[1].lower()]} x", text, flags=re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Cable:
    """A cable's name in the text, its ports' GB/s by the number behind it or None, how many there
    are or 0, and where it ends."""

    name: str
    number: float | None
    count: int
    end: int

    @property
    def full(self) -> float:
        return CABLES[self.name]

    @property
    def words(self) -> str:
        return f"{self.name}{8 * (self.number or self.full):g}"


def _cable_of(text: str) -> _Cable | None:
    found = _CABLE.search(text)
    if found is None:
        return None
    name, number = (
        found[3].upper(), float(found[4]) / 8 if found[4] and int(found[4]) in SOLD else None,
    )
    if number and number > 2 * CABLES[name]:
        number = None
    return _Cable(name, number, int(found[1] or found[2] or found[5] or 0), found.end())


def _several(text: str, named: _Cable | None) -> Said | None:
    """So many of a rate, in one of the orders in which people write it."""
    if (many := _MANY.search(text)) and not (
        named and _gb_s(*many.groups()[2:5]) > (1 + AGREE) * named.full
    ):
        return _of(text, many.end(), int(many[1]), _gb_s(*many.groups()[2:5]), named)
    if each := _EACH_OF.search(text) or _EACH.search(text):
        return _of(text, each.end(), int(each[1]), _gb_s(*each.groups()[1:4]), named)
    if behind := _BEHIND.search(text):
        return _of(text, behind.end(), int(behind[4]), _gb_s(*behind.groups()[:3]), named)
    for bare in () if named and named.count else _BARE.finditer(text):
        count, rate = sorted((int(bare[1]), int(bare[2])), key=lambda number: number in SOLD)
        if rate in SOLD and 0 < count <= MOST_PORTS:
            found = _of(text, bare.end(), count, rate / 8, named)
            known = named is not None and rate / 8 in (named.number, named.full)
            words = f"{bare[0]} as {count} times {rate} Gbit/s, for the row has no unit"
            return found if known else replace(found, assumed=(*found.assumed, words))
    return None


def _of(text: str, end: int, count: int, each: float, named: _Cable | None) -> Said:
    """`count` ports of `each` GB/s, a node's unless the words behind `end` say whose; the number
    behind a cable's name may contradict."""
    whose, among = _whose(text[end:])
    said = Said(gb_s=count * each / among, whose=whose or "node", count=count)
    if whose == "nic":
        said = replace(said, whose="gpu" if count == 1 else "")
    if named and named.number and _differ(named.number, each):
        return _contradicted(said, count * named.number / among, f"{named.words} contradicts "
                                                                 f"{8 * each:g} Gbit/s")
    return said


def _cables(text: str, named: _Cable | None) -> Said | None:
    """What a cable's name says, with the number behind it and a rate that stands beside it."""
    if named is None:
        return None
    each = min(named.number or named.full, named.full)
    plain = _single(text)
    if (
        plain
        and plain.whose
        and not named.count
        and not (plain.whose == "nic" and named.number and _differ(plain.gb_s, each))
    ):
        return plain
    if plain and named.number is None and plain.gb_s <= (1 + AGREE) * named.full:
        each = plain.gb_s
    elif plain and not named.count and (named.number is None or plain.gb_s > 3 * each):
        return plain
    whose, among = _whose(text[named.end :])
    whose = whose or ("node" if named.count else "")
    said = Said(
        gb_s=(named.count or 1) * each / among, whose=whose, is_cable=not named.count,
        count=named.count,
    )
    if whose == "nic":
        said = replace(said, whose="gpu" if named.count <= 1 else "")
    if named.number and _differ(named.number, each):
        words = f"{named.words} contradicts {8 * named.full:g} Gbit/s of a port of {named.name}"
        return _contradicted(said, said.gb_s * named.number / each, words)
    if plain and _differ(plain.gb_s, each) and _differ(plain.gb_s, (named.count or 1) * each):
        is_port = plain.gb_s <= (1 + AGREE) * named.full or not named.count
        instead = (named.count or 1) * plain.gb_s / among if is_port else plain.gb_s
        return _contradicted(said, instead, f"{named.words} contradicts {8 * plain.gb_s:g} Gbit/s")
    return said


def _contradicted(said: Said, instead: float, words: str) -> Said:
    words = f"{words}: {8 * said.gb_s:g} Gbit/s, and the band covers {8 * instead:g}"
    return replace(said, instead=instead, assumed=(*said.assumed, words))


def _single(text: str) -> Said | None:
    """A rate by itself."""
    one = _ONE.search(text)
    if one is None:
        return None
    whose, among = (
        _whose(text[one.start() :]) if not one[5] else (_owner(one[5]), _at_least_one(one[4]))
    )
    return Said(gb_s=_gb_s(*one.groups()[:3]) / among, whose=whose)


def _shared(text: str, said: Said) -> Said:
    """`said` of one port where the text says elsewhere how many a node or a GPU has, or how many
    GPUs have one together."""
    if said.count or said.whose not in ("", "nic"):
        return replace(said, whose="gpu" if said.whose == "nic" else said.whose)
    if shared := _SHARED.search(text):
        return replace(said, gb_s=said.gb_s / _at_least_one(shared[1] or shared[2]), whose="gpu")
    if (ports := _PORTS_OF.search(text)) and (whose := _owner(ports[3])) != "nic":
        return replace(
            said, gb_s=said.gb_s * int(ports[1]) / _at_least_one(ports[2]), whose=whose,
            count=int(ports[1]),
        )
    return replace(said, whose="gpu" if said.whose == "nic" else "")


def _whose(behind: str) -> tuple[str, int]:
    """Whose ports the words behind them say they are, "" for nobody's, and how many of those have
    them together."""
    found = _WHOSE.match(behind)
    return (_owner(found[5]), _at_least_one(found[4])) if found else ("", 1)


def _at_least_one(count: str | None) -> int:
    return max(1, int(count or 1))


def _owner(word: str) -> str:
    lower = word.lower()
    return "node" if lower in _NODES else "gpu" if lower in ("gpu", "device", "rank") else "nic"


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > AGREE * other


def _gb_s(number: str, prefix: str, unit: str) -> float:
    return (
        float(number) * (1000 if prefix.upper() == "T" else 1) / (1 if unit.startswith("B/") else 8)
    )
