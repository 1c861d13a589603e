"""Gradients that a traced model marks as accumulated or copied: in a file, in a plan, and in false
files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.zsim.autograd.test_traced import BATCH, MODEL
from zsim.autograd.lowered import Accumulated, LoweredModule, ParameterGradient, TapeEvent
from zsim.autograd.traced.model import TracedModel, check
from zsim.autograd.traced.traced_file import dump, parse
from zsim.errors import ZsimError
from zsim.ir.ledger_replay import replay
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Alloc, Free, Op
from zsim.models.training_options import Precision
from zsim.strategies import STRATEGIES
from zsim.strategies.building.training import Training

Row = list[Any]
WEIGHT, BIAS, EARLIER = "blocks.1.fc1.weight", "blocks.1.fc1.bias", "blocks.1.fc2.bias"


def telling(model: TracedModel, *, at_once: bool = False, copied: str = "") -> TracedModel:
    """`model` whose gradients are accumulated as soon as they are made, or at the end of their
    module's backward."""

    def with_accumulations(tape: tuple[TapeEvent, ...]) -> Iterator[TapeEvent]:
        due: list[TapeEvent] = []
        end = len(tape) - 2  # the loss and its gradient go last
        for index, event in enumerate(tape):
            if index == end:
                yield from due
            if isinstance(event, ParameterGradient):
                yield replace(
                    event, node_makes_more=False, accumulation_is_marked=True,
                    is_copy=event.fqn == copied,
                )
                due.append(Accumulated(event.fqn))
                if at_once:
                    yield due.pop()
            else:
                yield event

    def changed(module: LoweredModule) -> LoweredModule:
        memory = tuple(with_accumulations(module.backward.memory))
        return replace(module, backward=replace(module.backward, memory=memory))

    return check(replace(model, lowered=tuple(map(changed, model.lowered))))


def planned(model: TracedModel, strategy: str) -> tuple[Op, ...]:
    """The steady step of two micro-batches of which the last reduces."""
    known = STRATEGIES[strategy]
    modules = model.modules_for(BATCH, dtype=model.dtype, casts_input=known.casts_input)
    batch, precision = (
        replace(BATCH, accumulation=2), Precision(parameters=model.dtype, reduce=model.dtype),
    )
    training = Training(
        model=model, modules=modules, batch=batch, precision=precision, sync="last", device="cpu"
    )
    program = known.plan(
        training, mesh=Mesh(**dict.fromkeys(known.axes, 2)), options=known.options()
    )
    replay(program.ranks[0], timeline=False)
    return program.ranks[0].steady


def added(ops: tuple[Op, ...], fqn: str) -> list[str]:
    """Events of the second micro-batch's backward from the birth of the new gradient of `fqn` to
    its end, none without a birth."""
    events = [
        event for op in ops if op.kind == "backward" and op.micro_batch == 1 for event in op.memory
    ]
    made = [
        index
        for index, event in enumerate(events)
        if isinstance(event, Alloc) and event.buffer.startswith(f"{fqn}.")
    ]
    if not made:
        return []
    gone = events.index(Free(events[made[0]].buffer))
    return ["+" if isinstance(event, Alloc) else "-" for event in events[made[0] : gone + 1]]


def test_they_go_through_a_file() -> None:
    model = telling(MODEL, copied=WEIGHT)
    assert parse(dump(model).encode()) == model
    assert dump(model).count(",false,true,true]") == 1
    assert (
        dump(model).count('"accumulated"')
        == len(model.parameters)
        == dump(model).count(",false,true,false]") + 1
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "hsdp", "zero_redundancy"])
def test_a_gradient_that_is_added_to_another_goes_when_the_model_says_so(strategy: str) -> None:
    at_once, at_end = (planned(telling(MODEL, at_once=first), strategy) for first in (True, False))
    assert added(at_once, EARLIER) == ["+", "-"]
    assert len(added(at_end, EARLIER)) > len(added(planned(MODEL, strategy), EARLIER)) > 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "hsdp", "zero_redundancy"])
def test_what_is_added_as_it_is_needs_no_copy(strategy: str) -> None:
    assert added(planned(telling(MODEL, copied=WEIGHT), strategy), WEIGHT) == []
    assert added(planned(telling(MODEL), strategy), WEIGHT) != []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_lets_go_of_them_all(strategy: str) -> None:
    for copied in ("", WEIGHT):
        ops = planned(telling(MODEL, copied=copied), strategy)
        made = {event.buffer for op in ops for event in op.memory if isinstance(event, Alloc)}
        assert {
            event.buffer for op in ops for event in op.memory if isinstance(event, Free)
        } >= made - {"buckets"}


# -- files from anywhere


def made(fqn: str) -> Row:
    return ["gradient", fqn, False, False, False]


def waits(fqn: str, *, is_copy: bool = False) -> Row:
    return ["gradient", fqn, False, True, is_copy]


def accumulated(fqn: str) -> Row:
    return ["accumulated", fqn]


def backward_of(table: Any, module: int) -> list[Row]:
    rows: list[Row] = table["modules"][module]["lowered"]["backward"]["memory"]
    return rows


def without(row: Row) -> Callable[[Any], None]:
    return lambda table: backward_of(table, 1).remove(row)


def with_more(row: Row, *, first: bool = False, module: int = 1) -> Callable[[Any], None]:
    def change(table: Any) -> None:
        rows = backward_of(table, module)
        rows.insert(0 if first else len(rows), row)

    return change


@pytest.mark.parametrize(("change", "message"), [
    (without(accumulated(BIAS)),
     f"{BIAS}: expected a gradient that is accumulated, found one that is only made"),
    (without(waits(BIAS)),
     f"blocks.1: expected gradients accumulated that wait for it, found {BIAS}"),
    (with_more(accumulated(BIAS)),
     f"blocks.1: expected gradients accumulated that wait for it, found {BIAS}"),
    (with_more(accumulated(BIAS), first=True),
     f"blocks.1: expected gradients accumulated that wait for it, found {BIAS}"),
    (with_more(made(BIAS)),
     f"blocks.1: expected gradients in backward, each until it is accumulated, found {BIAS}"),
    (with_more(made(BIAS), first=True),
     f"blocks.1: expected gradients in backward, each until .* found {BIAS}"),
    (with_more(waits(BIAS)),
     f"blocks.1: expected gradients in backward, each until it is accumulated, found {BIAS}"),
    (with_more(waits(WEIGHT), first=True),
     f"blocks.1: expected gradients in backward, each until .* found {WEIGHT}"),
    (with_more(accumulated("none")),
     "blocks.1: expected gradients accumulated that wait for it, found none"),
    (lambda table: table["modules"][1]["lowered"]["forward"]["memory"].append(waits(BIAS)),
     f"blocks.1: expected gradients in backward, each until it is accumulated, found {BIAS}"),
    (with_more(["accumulated"]), r"memory\[\d+\]\[1\]: expected a value, found nothing"),
    (with_more(waits("a name", is_copy=True)), "expected a name"),
])
def test_a_file_that_lies_about_them_is_refused(
    change: Callable[[Any], None], message: str
) -> None:
    table = json.loads(dump(telling(MODEL, copied=WEIGHT)))
    change(table)
    with pytest.raises(ZsimError, match=message):
        parse(json.dumps(table).encode())


@given(data=st.data())
def test_whatever_is_moved_in_a_file_it_is_refused_or_plans(data: st.DataObject) -> None:
    """An event of gradients is dropped, said twice, or put elsewhere; nothing but a ZsimError may
    come of it."""
    table = json.loads(dump(telling(MODEL, copied=WEIGHT)))
    tapes = [backward_of(table, index) for index in range(len(table["modules"]))] + [
        table["modules"][1]["lowered"]["forward"]["memory"]
    ]
    for _ in range(data.draw(st.integers(1, 3))):
        source, target = (data.draw(st.sampled_from(tapes)) for _ in range(2))
        events = [row for row in source if row[0] == "accumulated" or row[3:4] == [True]]
        if events:
            row = data.draw(st.sampled_from(events))
            if data.draw(st.booleans()):
                source.remove(row)
            if data.draw(st.booleans()):
                target.insert(data.draw(st.integers(0, len(target))), row)
    try:
        model = parse(json.dumps(table).encode())
    except ZsimError:
        return
    for strategy in ("ddp", "fsdp2", "zero3"):
        planned(model, strategy)
