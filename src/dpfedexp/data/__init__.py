"""Data sets and who holds which rows."""

from dpfedexp.data.arrays import cast_inputs, cast_targets
from dpfedexp.data.federation import Federation
from dpfedexp.data.generated import Generated
from dpfedexp.data.idx import read_idx
from dpfedexp.data.mnist import ImageData, Standardise, load_mnist, mnist_federation
from dpfedexp.data.partition import Assignment
from dpfedexp.data.synthetic import SyntheticProblem, synthetic_regression, synthetic_regression_stream

__all__ = [
    "Assignment",
    "Federation",
    "Generated",
    "ImageData",
    "Standardise",
    "SyntheticProblem",
    "cast_inputs",
    "cast_targets",
    "load_mnist",
    "mnist_federation",
    "read_idx",
    "synthetic_regression",
    "synthetic_regression_stream",
]
