"""Tables as DataFrames of pandas, which is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zsim.errors import ZsimError


class DataFrameError(ZsimError):
    """A DataFrame that cannot be made, as pandas is not installed."""


def data_frame(rows: Sequence[Any], columns: Sequence[str]) -> Any:
    """The DataFrame of `rows`, sequences or mappings; DataFrameError without pandas."""
    try:
        import pandas
    except ImportError:
        raise DataFrameError(
            where="to_pandas()", expected="pandas", found="none",
            remedy="pip install 'zsim[notebook]'",
        ) from None
    return pandas.DataFrame(list(rows), columns=list(columns))
