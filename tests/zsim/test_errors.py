"""Errors survive what carries them: pools of processes pickle them, and tests copy them."""

import copy
import importlib
import inspect
import pickle
import pkgutil
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

import zsim
from zsim.errors import RankError, ZsimError, shown
from zsim.ir.mesh import Mesh
from zsim.ir.run import RunRecord

PARTS = {"where": "a", "expected": "b", "found": "c", "remedy": "d"}
RUN = RunRecord(
    scenario="s", backend="gloo", interpreter="observer", world_size=1, mesh=Mesh(), ranks=()
)
ARGUMENTS = PARTS | {
    "problems": ("a: b", "c: d"), "results": {0: [1]}, "error": RankError(**PARTS), "run": RUN
}
"""Values of the parameters that errors have."""


def kinds(package):
    """Every error that the package's modules define, and ZsimError.

    A plugin's tests import modules anew, so classes of the same name may be left of those before.
    """
    there = importlib.import_module(package)
    for module in pkgutil.walk_packages(there.__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    classes = [ZsimError]
    for kind in classes:
        classes += kind.__subclasses__()
    own = [kind for kind in classes if kind.__module__.partition(".")[0] == package]
    return [
        kind for kind in own
        if getattr(sys.modules[kind.__module__], kind.__qualname__, kind) is kind
    ]


def values(error):
    """Values of an error, its inner errors by their values."""
    return {
        name: values(value) if isinstance(value, ZsimError) else value
        for name, value in vars(error).items()
    } | {"text": str(error), "args": error.args, "exit_code": error.exit_code}


@pytest.mark.parametrize(("package", "least"), [("zsim", 20), ("zreal", 4)])
def test_every_error_is_pickled_and_copied_whole(package, least):
    if package == "zreal":
        pytest.importorskip("torch")
    classes = kinds(package)
    assert len(classes) >= least
    for kind in classes:
        parameters = inspect.signature(kind).parameters
        error = kind(**{name: ARGUMENTS[name] for name in parameters})
        error.remedy = "changed afterwards"
        pickled = [pickle.loads(pickle.dumps(error, version)) for version in (0, 2, 5)]
        for other in (copy.copy(error), copy.deepcopy(error), *pickled):
            assert type(other) is kind
            assert values(other) == values(error)


def fail(ranks):
    return zsim.simulate(
        zsim.Scenario(
            model={"preset": "gpt-tiny"}, batch={"micro_batch": 2, "sequence_length": 64},
            cluster={"preset": "cpu-gloo", "ranks": 4}, strategy={"name": "fsdp2"},
        ),
        ranks=ranks,
    )


def test_an_error_in_a_pool_of_processes_arrives():
    with ProcessPoolExecutor(1) as pool, pytest.raises(ZsimError, match="ranks 0 to 3") as caught:
        pool.submit(fail, (9,)).result()
    assert caught.value.where == "ranks"


def test_an_integer_that_python_does_not_print_is_told_by_its_length():
    assert shown(10**5000) == shown([10**5000])[1:-1] == "an integer of 16,610 bits"
    assert shown(2**70) == "1180591620717411303424"
