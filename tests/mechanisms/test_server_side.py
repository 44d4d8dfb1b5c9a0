"""The server's side of a mechanism: wide sums block by block, widths, and the mean over those who came."""

import sys

import pytest
import torch

from dpfedexp.accounting import Query, Sampling
from dpfedexp.core.clipping import BLOCK
from dpfedexp.core.noise import lattice as discrete
from dpfedexp.core.noise.streams import Streams
from dpfedexp.core.sums import Sums
from dpfedexp.core.votes import Vote, within_clip
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, PrivUnit
from dpfedexp.mechanisms.base import total


@pytest.mark.parametrize("width", [BLOCK, BLOCK + 1, 2 * BLOCK + 3])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_rows_are_added_in_double_precision_however_wide_they_are(width, rows):
    given = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    found = total(given)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, given.double().sum(0), rtol=1e-14, atol=1e-14)  # three doubles in another order


@pytest.mark.parametrize("kind", [CentralGaussian, LocalGaussian])
def test_only_the_free_rule_has_a_coordinate_more(kind):
    assert kind(1.0, 1.0).width(7) == 7
    assert kind(1.0, 1.0, numerator="free").width(7) == 8
    assert PrivUnit(1.0, 7).width(7) == 7


@pytest.mark.parametrize("mechanism", [PrivUnit(1.0, 3), LocalGaussian(1.0, 1.0, "paper")])
def test_a_local_release_is_the_mean_over_those_who_reported(mechanism):
    sums = Sums(torch.tensor([4.0, 8.0, 2.0]).double(), torch.tensor(6.0).double(), torch.zeros(0).double(), 4)
    release = mechanism.release(sums, 100.0, None, None)
    assert release.c_bar.tolist() == [1.0, 2.0, 0.5]
    assert release.statistic == 1.5
    nobody = mechanism.release(Sums.zero(3), 100.0, None, None)
    assert nobody.c_bar.tolist() == [0.0] * 3
    assert nobody.statistic == 0.0


def test_the_free_rules_coordinate_is_the_last_one_and_no_part_of_the_mean():
    sums = Sums(torch.tensor([4.0, 8.0, 2.0, 6.0]).double(), torch.tensor(0.0), torch.zeros(0), 4)
    local = LocalGaussian(1.0, 1.0, "free").release(sums, 100.0, None, None)
    assert (local.c_bar.tolist(), local.statistic) == ([1.0, 2.0, 0.5], 1.5)
    noise = Streams(0).at("noise", 1)
    central = CentralGaussian(1.0, 1e-9, numerator="free").release(sums, 8.0, noise, noise)
    assert central.c_bar.tolist() == pytest.approx([0.5, 1.0, 0.25], abs=1e-7)
    assert central.statistic == pytest.approx(0.75, abs=1e-7)


@pytest.mark.parametrize(("adjacency", "both"), [("replace-one", 2.0), ("add-remove", 1.0)])
def test_every_query_is_charged_with_its_own_bound_sensitivity_noise_and_diameter(adjacency, both):
    mechanism = CentralGaussian(
        0.3, 5.0, adjacency, "paper", 7.0, (within_clip(11.0), Vote("loss", 0.0, 10.0, noise=13.0))
    )
    for sampling in (Sampling(), Sampling("poisson", 0.1)):
        assert mechanism.event(sampling).queries == (
            Query("update", 1.0, both, 5.0, 2.0),
            Query("squared norms", 1.0, 1.0, 7.0, 1.0),
            Query("within clip", 0.5, 0.5 * both, 11.0, 1.0),
            Query("loss", 0.5, 0.5 * both, 13.0, 1.0),
        )


def test_strict_noise_without_opendp_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    discrete._discrete.cache_clear()
    with pytest.raises(InputError, match="needs OpenDP"):
        discrete.discrete_gaussian((2,), 3.0)
