"""The constants that `bind` puts into a mechanism, and the clip that reaches it."""

import pytest

from dpfedexp import AdaptiveClip, Execution, Poisson, Sgd, cdp_fedexp, dp_fedavg, train
from dpfedexp.accounting import Sampling
from dpfedexp.data import synthetic_regression
from dpfedexp.mechanisms import CentralGaussian
from dpfedexp.mechanisms.central_gaussian import SecureCentralGaussian
from dpfedexp.models import linear_regression

D, M, Z = 500, 1000, 5.0


@pytest.mark.parametrize("participation", [None, Poisson(0.1)])
def test_the_scalar_noise_of_the_paper_is_d_z2_over_the_cohort(participation):
    """σ_ξ = dσ²/M with σ² = z²C²/M on the mean; on the sum over the cohort, in units of C², that is d·z²/M."""
    cohort = float(M) if participation is None else participation.expected(M)
    sampling = Sampling() if participation is None else participation.sampling(M)
    for clip in (0.3, AdaptiveClip(initial=0.3)):
        bound = cdp_fedexp(clip=clip, noise_multiplier=Z, numerator="paper").bind(D, cohort, sampling, 50)
        assert bound.scalar_multiplier == pytest.approx(D * Z * Z / cohort, rel=1e-15)
        mean_noise, c2 = Z * 0.3 / cohort, 0.3**2
        assert bound.scalar_multiplier * c2 / cohort == pytest.approx(D * mean_noise**2, rel=1e-12)


def test_update_and_count_together_cost_what_the_noise_multiplier_says():
    for adjacency, both in (("replace-one", 2.0), ("add-remove", 1.0)):
        algorithm = dp_fedavg(clip=AdaptiveClip(count_noise=4.0), noise_multiplier=Z, adjacency=adjacency)
        bound = algorithm.bind(D, float(M), Sampling(), 50)
        assert [(vote.name, vote.noise) for vote in bound.votes] == [("within clip", 4.0)]
        assert bound.event(Sampling()).mu == pytest.approx(both / Z, rel=1e-12)
        assert bound.noise_multiplier > Z


@pytest.mark.parametrize("secure", [False, True])
def test_the_adaptive_clip_of_a_round_is_the_radius_that_its_mechanism_keeps_and_scales_its_noise_by(
    monkeypatch, secure
):
    """Every round: rows inside the ball of the history's clip, and noise of z times that clip."""
    kind = SecureCentralGaussian if secure else CentralGaussian
    collected, noise = [], []

    def collect(self, report, original=kind.collect):
        sums = original(self, report)
        collected.append((self.clip, float(report.vector.double().norm(dim=1).max()), float(sums.vector.norm())))
        return sums

    def release(self, sums, denominator, first, second, original=kind.release):
        done = original(self, sums, denominator, first, second)
        noise.append((self.clip, self.noise_multiplier, denominator * done.c_bar - sums.vector[: len(done.c_bar)]))
        return done

    monkeypatch.setattr(kind, "collect", collect)
    monkeypatch.setattr(kind, "release", release)
    size = 2000
    problem = synthetic_regression(6, size, seed=1)
    done = train(
        linear_regression(size),
        problem.federation,
        cdp_fedexp(clip=AdaptiveClip(initial=8.0, rate=3.0), noise_multiplier=1.0),
        local=Sgd(lr=1e-4, steps=1),
        rounds=4,
        secure=secure,
        progress=False,
        execution=Execution(device="cpu", chunk_size=6, trainer="loop"),
    )
    clips = [record["clip"] for record in done.history]
    assert len(set(clips)) == 4
    assert [c for c, *_ in noise] == clips
    # A secure run collects client by client.
    assert list(dict.fromkeys(c for c, *_ in collected)) == clips
    for clip, longest, total in collected:
        assert longest <= clip * (1 + 1e-6)
        assert total <= 6 * clip
    for clip, z, drawn in noise:
        # The standard error of a standard deviation of 2,000 numbers is 1.6%; 10% is more than six of them.
        assert float(drawn.std()) == pytest.approx(z * clip, rel=0.1)
