"""Tables as DataFrames of pandas, which is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zsim.errors import ZsimError
from zsim.io.extras import library


class DataFrameError(ZsimError):
    """A DataFrame that cannot be made, as pandas is not installed."""


def data_frame(rows: Sequence[Any], columns: Sequence[str]) -> Any:
    """The DataFrame of `rows`, sequences or mappings; DataFrameError without pandas."""
    pandas = library(
        "pandas", error=DataFrameError, where="to_pandas()", expected="pandas",
        remedy="pip install 'zsim[notebook]'",
    )
    return pandas.DataFrame(list(rows), columns=list(columns))
