"""Events from settings beside those that the mechanisms make."""

from __future__ import annotations

import pytest

from dpfedexp.accounting.events import Sampling
from dpfedexp.accounting.events.charges import central_gaussian as central_gaussian_event
from dpfedexp.accounting.events.charges import local_gaussian as local_gaussian_event
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian
from dpfedexp.votes import within_clip

SAMPLINGS = [Sampling(), Sampling("poisson", 0.1), Sampling("fixed", 0.3)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: sampling.kind)
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_a_central_mechanism_charges_the_event_of_its_settings(sampling, adjacency):
    plain = CentralGaussian(0.3, 5.0, adjacency)
    paper = CentralGaussian(0.3, 5.0, adjacency, "paper", 7.0, (within_clip(4.0),))
    assert plain.event(sampling) == central_gaussian_event(5.0, adjacency, sampling)
    joint = central_gaussian_event(5.0, adjacency, sampling, scalar_multiplier=7.0, votes=(("within clip", 4.0),))
    assert paper.event(sampling) == joint
    assert [query.name for query in joint.queries] == ["update", "squared norms", "within clip"]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: sampling.kind)
def test_a_local_mechanism_charges_the_event_of_its_settings(sampling):
    assert LocalGaussian(0.3, 0.7).event(sampling) == local_gaussian_event(0.7, sampling)
    assert LocalGaussian(0.3, 0.7, "naive").event(sampling) == local_gaussian_event(0.7, sampling, squares=True)


def test_squared_norms_without_a_noise_are_refused_and_not_left_out_of_the_charge():
    with pytest.raises(InputError, match="scalar_multiplier is missing"):
        CentralGaussian(0.3, 5.0, numerator="paper").event(Sampling())
