"""Times of collectives measured size by size: between their points, in a file, and in a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.cluster.cluster_presets import load_cluster
from zsim.cluster.measured_times import MeasuredTimes
from zsim.engine.bands.error_bands import collective_width
from zsim.engine.costs.op_costs import Costs
from zsim.errors import ScenarioError
from zsim.scenario.parts import cluster_file

HEAD = """
description = "mine"
kind = "cpu"
device = "cpu-core"
collectives = "gloo"
devices_per_node = 1
nics_per_node = 1
"""
LINK = """
[links.{name}]
bandwidth = {{ value = "1 GB/s", provenance = "assumed", source = "a test" }}
latency = {{ value = "1 us", provenance = "assumed", source = "a test" }}
"""
OVERHEADS = ("collective", "issue_kernel", "issue_collective", "issue_hook")
REST = """
[host]
memory_bandwidth = { value = "10 GB/s", provenance = "assumed", source = "a test" }

[overheads]
""" + "\n".join(
    f'{name} = {{ value = "0 us", provenance = "assumed", source = "a test" }}'
    for name in OVERHEADS
)
TIMES = """
[[times]]
collective = "all_gather"
ranks = 2
bytes = ["1000 B", "3000 B"]
times = ["50 ns", "90 ns"]
width = "20 %"
provenance = "measured"
source = "a test"
"""
LINKS = "".join(LINK.format(name=name) for name in ("fabric", "pcie", "host", "rail"))


def parsed(times=TIMES):
    text = HEAD + LINKS + REST + "\n" + times
    return cluster_file.parse(text.encode(), where="mine.toml", ranks=2)


@st.composite
def measured(draw):
    sizes = sorted(draw(st.sets(st.integers(1, 2**30), min_size=1, max_size=8)))
    times = sorted(draw(st.lists(st.integers(1, 10**9), min_size=len(sizes), max_size=len(sizes))))
    return MeasuredTimes(
        collective="all_reduce", ranks=2, width=0.1, source="",
        points=tuple(zip(sizes, times, strict=True)),
    )


@given(measured(), st.integers(0, 2**31), st.integers(0, 2**31))
def test_times_go_through_their_points_and_never_fall(times, a, b):
    assert [times.ns(nbytes) for nbytes, _ in times.points] == [ns for _, ns in times.points]
    assert times.ns(min(a, b)) <= times.ns(max(a, b))


def test_a_cluster_with_measured_times_takes_them_and_their_width():
    cluster = parsed()
    assert Costs(cluster=cluster).collective_ns("all_gather", 2000, (0, 1)) == 70
    assert collective_width("all_gather", 2000, cluster, cluster.path((0, 1))) == 0.2


def test_what_was_not_measured_goes_by_the_closed_form():
    cluster, preset = parsed(), load_cluster("cpu-gloo", ranks=2)
    assert collective_width("all_reduce", 2000, cluster, cluster.path((0, 1))) != 0.2
    assert preset.times == ()
    assert Costs(cluster=cluster).collective_ns("all_reduce", 2000, (0, 1)) > 70


@pytest.mark.parametrize(("before", "after", "said"), [
    ('"3000 B"]', '"900 B"]', "times[0]: expected 1 to 64 ascending bytes, as many as times"),
    ('"90 ns"]', "]", "times[0]: expected 1 to 64 ascending bytes, as many as times"),
    ('"90 ns"]', '"0 ns"]', "times[0].times[1]: expected 1 to"),
    ('"all_gather"', '"gather"', 'times[0].collective: expected all_gather'),
    ("ranks = 2", "ranks = 0", "times[0].ranks: expected at least 1"),
    ('"20 %"', '"120 %"', "times[0].width: expected 0.08 to 0.9"),
    ('"measured"', '"published"', 'times[0].provenance: expected measured'),
    ('source = "a test"\n', "", "times[0].source: expected a value, found nothing"),
])
def test_odd_times_in_a_file_are_refused_with_their_key(before, after, said):
    assert before in TIMES
    with pytest.raises(ScenarioError) as error:
        parsed(TIMES.replace(before, after, 1))
    assert f"cluster.file: mine.toml: {said}" in str(error.value)
