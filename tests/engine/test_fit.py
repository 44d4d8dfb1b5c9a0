"""`fit`: nothing is asked for, and everything that was chosen is in the statement."""

import pytest
import torch

from dpfedexp import Federation, InputError, Sgd, cdp_fedexp, fit
from dpfedexp.accounting.statement import PrivacyStatement
from dpfedexp.algorithms.participation import Full
from dpfedexp.engine.fit import MANY, USUAL, rounds_for
from dpfedexp.models import linear_regression

D = 4


def clients(count=150):
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(D, generator=generator)
    rows = [torch.randn(6, D, generator=generator) for _ in range(count)]
    return Federation.from_clients([(x, x @ truth) for x in rows])


def test_the_statement_names_what_was_chosen_and_nothing_that_was_given():
    run = fit(linear_regression(D), clients(), rounds=3, progress=False)
    facts = " ".join(run.privacy.chosen)
    for words in (
        "cdp_fedexp with the safe step",
        "δ = 1e-05",
        "10 full-batch local steps",
        "the local rate",
        "the clip",
    ):
        assert words in facts
    assert " rounds" not in facts
    assert f"{run.history[0]['local_rate']:.3g} by votes at first" in facts
    assert "Nobody tuned this run: it chose the algorithm" in run.privacy.text
    assert PrivacyStatement.from_json(run.privacy.to_json()) == run.privacy
    given = fit(
        linear_regression(D), clients(), rounds=2, delta=1e-6, local=Sgd(lr=0.1, steps=2), epsilon=4, progress=False
    )
    facts = " ".join(given.privacy.chosen)
    assert not any(words in facts for words in ("δ", "local", " rounds"))
    assert (given.privacy.delta, len(given.history)) == (1e-6, 2)
    assert 3.9 < given.privacy.epsilon_total <= 4.0


def test_the_rounds_follow_from_the_noise_of_one():
    algorithm = cdp_fedexp(clip="adaptive", target_epsilon=8.0)
    counts = [rounds_for(algorithm, d, 1000, Full()) for d in (4, 5_000, 10_000_000)]
    assert counts == [MANY, USUAL, USUAL]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"epsilon": 0.0}, "epsilon is 0.0; it must be a positive number"),
        ({"rounds": 0}, "rounds is 0; it must be a positive whole number"),
        ({"lr": 0.1}, "lr"),
    ],
)
def test_wrong_arguments_are_one_sentence(wrong, sentence):
    with pytest.raises((InputError, TypeError), match=sentence):
        fit(linear_regression(D), clients(10), progress=False, **wrong)
