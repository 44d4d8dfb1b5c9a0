"""Data sets, and federations that say which client holds which rows."""

from typing import TYPE_CHECKING

from dpfedexp.lazy import lazy_names

if TYPE_CHECKING:
    from dpfedexp.data.arrays import cast_inputs as cast_inputs
    from dpfedexp.data.arrays import cast_targets as cast_targets
    from dpfedexp.data.data_sets import Standardize as Standardize
    from dpfedexp.data.data_sets import SyntheticProblem as SyntheticProblem
    from dpfedexp.data.data_sets import load_mnist as load_mnist
    from dpfedexp.data.data_sets import read_idx as read_idx
    from dpfedexp.data.data_sets import synthetic_regression as synthetic_regression
    from dpfedexp.data.federation import Federation as Federation
    from dpfedexp.data.partition import Assignment as Assignment
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
