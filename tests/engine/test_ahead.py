"""Noise that is drawn while a round trains is the noise that would have been drawn after it."""

from __future__ import annotations

import torch

from dpfedexp import Federation, Sgd, cdp_fedexp, train
from dpfedexp.core.noise.streams import Streams
from dpfedexp.engine import rounds
from dpfedexp.engine.rounds import Ahead, drawn_ahead

CPU, SERVER = torch.device("cpu"), torch.zeros(1, dtype=torch.int64)


def test_the_draws_are_the_sources_own():
    source = Streams(3).at("central noise", 7)
    ahead = Ahead(source, 1000, CPU)
    for asked in (
        (SERVER, 1000, CPU, torch.float64),
        (SERVER, 1000, CPU, torch.float64),
        (SERVER, 999, CPU, torch.float64),
        (SERVER + 1, 1000, CPU, torch.float64),
    ):
        assert torch.equal(ahead.normal(*asked), source.normal(*asked))
    assert torch.equal(ahead.uniform(SERVER, 5), source.uniform(SERVER, 5))


def test_a_processor_that_trains_itself_draws_nothing_ahead():
    source = Streams(3).at("central noise", 7)
    assert drawn_ahead(source, 10**6, CPU, CPU) is source


def test_a_run_that_draws_ahead_is_the_same_run(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    clients = Federation.from_clients(
        [(torch.randn(4, 6, generator=generator), torch.randn(4, generator=generator)) for _ in range(8)]
    )

    def run() -> torch.Tensor:
        model = torch.nn.Sequential(torch.nn.Linear(6, 1), torch.nn.Flatten(0))
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        algorithm = cdp_fedexp(clip=0.3, noise_multiplier=1.0)
        done = train(model, clients, algorithm, local=Sgd(lr=0.1, steps=1), rounds=3, progress=False, device="cpu")
        return torch.cat([p.detach().flatten() for p in done.model.parameters()])

    plain, started = run(), []
    monkeypatch.setattr(
        rounds, "drawn_ahead", lambda noise, width, *devices: started.append(width) or Ahead(noise, width, CPU)
    )
    assert torch.equal(run(), plain)
    assert started == [8, 8, 8]
