"""What nccl rows say of their machine: figures as programs write them, parts nobody has measured, links and networks in open words."""

from __future__ import annotations

import pytest

from tests.zsim.test_nccl_rows import GIB
from zsim.measurements.nccl_files import read_csv

COLUMNS = "collective,gpu,n_ranks,n_nodes,size_bytes,time_us\n"


@pytest.mark.parametrize("cells", ["8.0,1,1073741824", "8,1.0,1073741824", "8,1,1073741824.0", "8.00,1.,1073741824.000000"])
def test_a_whole_number_is_one_also_with_zeros_behind_its_point(cells: str) -> None:
    """As programs write a column that has a gap somewhere."""
    (row,) = read_csv(f"{COLUMNS}all_reduce,A100,{cells},8203.9\n", source="a.csv").rows
    assert (row.n_ranks, row.n_nodes, row.size_bytes) == (8, 1, GIB)


@pytest.mark.parametrize(
    ("cells", "name"), [("8.5,1,8", "n_ranks"), ("8,1.01,8", "n_nodes"), ("8,1,.0", "size_bytes"), ("8,1,8.0.0", "size_bytes")]
)
def test_a_part_of_a_rank_or_of_a_byte_is_refused(cells: str, name: str) -> None:
    found = read_csv(f"{COLUMNS}all_reduce,A100,{cells},8203.9\n", source="a.csv")
    assert found.reasons == {f"{name} missing or no whole number": 1}
