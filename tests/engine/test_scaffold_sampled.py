"""SCAFFOLD with a sampled cohort, round by round by hand."""

import pytest
import torch

from dpfedexp import FixedSize, Poisson, Sgd, dp_scaffold, train
from dpfedexp.data import synthetic_regression
from dpfedexp.models import linear_regression
from tests.engine.plain import plain_update

M, D, ROUNDS = 12, 5, 5
CLIP, LR, STEPS = 0.1, 0.02, 3
PROBLEM = synthetic_regression(M, D, seed=1)


@pytest.mark.parametrize("participation", [FixedSize(4), Poisson(0.4)])
def test_sampled_scaffold_follows_its_equations_for_five_rounds(participation, monkeypatch):
    """The server's control keeps 1 − share of itself, which shows in the model from the third round on."""
    cohorts = []
    kind = type(participation)

    def cohort(*given, original=kind.cohort, **more):
        cohorts.append(original(*given, **more))
        return cohorts[-1]

    monkeypatch.setattr(kind, "cohort", cohort)
    # So little noise that the model is the equations' own to float32 rounding.
    algorithm = dp_scaffold(clip=CLIP, noise_multiplier=1e-7)
    options = {"local": Sgd(lr=LR, steps=STEPS), "participation": participation, "device": "cpu", "progress": False}
    result = train(linear_regression(D), PROBLEM.federation, algorithm, rounds=ROUNDS, **options)

    share = 4 / 12 if kind is FixedSize else 0.4
    model = linear_regression(D)
    w, c, controls = torch.zeros(D), torch.zeros(D), torch.zeros(M, D)
    assert len(cohorts) == ROUNDS
    for members in cohorts:
        with torch.no_grad():
            next(model.parameters()).copy_(w[None])
        deltas = torch.zeros(len(members), D)
        for row, i in enumerate(members.tolist()):
            raw = plain_update(model, *PROBLEM.federation.client(i), lr=LR, steps=STEPS, correction=c - controls[i])
            deltas[row] = raw * min(1.0, CLIP / float(raw.norm()))
        mean = deltas.sum(0) / (share * M)
        controls[members] = controls[members] - c - deltas / (STEPS * LR)
        w, c = w + mean, (1 - share) * c - share * mean / (STEPS * LR)
    found = torch.cat([p.detach().flatten() for p in result.model.parameters()])
    torch.testing.assert_close(found, w, rtol=1e-3, atol=1e-5)  # float32 local steps in another order
    assert float(w.norm()) > 0.05
