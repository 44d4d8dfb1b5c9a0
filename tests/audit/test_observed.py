"""What the run audits refuse: they attack a known radius, a known noise and a guarantee that is a μ."""

import pytest

from dpfedexp import cdp_fedexp, dp_fedavg, fedavg
from dpfedexp.accounting import GaussianEvent, Query, Sampling, compose
from dpfedexp.audit.mechanisms.cases import _central_cases
from dpfedexp.audit.runs.observed import clip_and_noise, mu_of
from dpfedexp.errors import InputError


def test_an_observed_run_has_the_clip_and_the_noise_of_its_algorithm():
    assert clip_and_noise(dp_fedavg(clip=0.5, noise_multiplier=2.0)) == (0.5, 2.0)


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        (cdp_fedexp(clip="adaptive", noise_multiplier=2.0), "adapts; this audit needs a fixed radius"),
        (dp_fedavg(clip=0.5, target_epsilon=8.0), "noise_multiplier of .* is missing; this audit needs it"),
        (fedavg(), "noise_multiplier of .* is missing; this audit needs it"),
    ],
)
def test_a_clip_that_adapts_and_noise_that_is_not_given_are_refused(algorithm, sentence):
    with pytest.raises(InputError, match=sentence):
        clip_and_noise(algorithm)


def test_a_guarantee_without_mu_is_refused_and_one_with_it_is_read():
    query = (Query("update", 1.0, 2.0, 5.0),)
    full = compose([(GaussianEvent("central", "replace-one", query), 1)], 1e-5)
    assert mu_of(full, "full") == full.mu
    sampled = GaussianEvent("central", "replace-one", query, sampling=Sampling("poisson", 0.5))
    with pytest.raises(InputError, match="the guarantee of sampled has no μ"):
        mu_of(compose([(sampled, 1)], 1e-5), "sampled")


def test_a_case_of_the_papers_rule_whose_scalar_does_not_count_is_refused():
    with pytest.raises(InputError, match=r"z is 1; .* above 1\.665"):
        _central_cases(0.5, 1.0)
