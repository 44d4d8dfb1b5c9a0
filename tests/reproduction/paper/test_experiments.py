"""The paper's runs as TOML."""

from __future__ import annotations

import pytest
from reproduction.paper.experiments import experiment, names, vary
from reproduction.paper.published import TABLE_2

from dpfedexp.errors import InputError


@pytest.mark.parametrize("key", TABLE_2)
def test_every_file_has_the_printed_rate_and_clip(key):
    settings = experiment("-".join(key))
    lr, clip = TABLE_2[key]
    assert settings.algorithm.clip == clip
    if key == ("synthetic", "cdp", "fedavg"):
        assert settings.local.lr == 0.001, "at the printed 0.003 most clients diverge"
    else:
        assert settings.local.lr == lr


def test_every_file_builds_its_algorithm():
    for name in names():
        settings = experiment(name)
        assert settings.build_algorithm().private
        assert settings.run.rounds == 50
        assert settings.data.clients == 1000


def test_vary_changes_one_thing_and_none_takes_it_away():
    settings = experiment("mnist-cdp-fedexp")
    varied = vary(settings, {"algorithm.noise_multiplier": None, "algorithm.target_epsilon": 8.0})
    assert varied.algorithm.noise_multiplier is None
    assert varied.algorithm.target_epsilon == 8.0
    assert varied.local == settings.local
    assert settings.algorithm.noise_multiplier == 5.0


def test_an_unknown_experiment_names_the_nearest():
    with pytest.raises(InputError, match="mnist-cdp-fedexp"):
        experiment("mnist-cdp-fedex")
