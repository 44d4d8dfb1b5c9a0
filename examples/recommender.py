"""Matrix factorisation by user: each user's ratings stay private, films share their factors.

    python examples/recommender.py

A user's own taste never leaves the user: the model holds films alone, and a user is described by the films rated before.
"""

import sys

import torch
from torch import nn

from dpfedexp import AdamW, Execution, Federation, cdp_fedexp, train


class Films(nn.Module):
    """Predicts a rating from a film's factors and the mean factors of what the user rated before, weighed by how."""

    def __init__(self, films: int, factors: int = 8) -> None:
        super().__init__()
        self.seen = nn.Embedding(films, factors)
        self.asked = nn.Embedding(films, factors)
        self.bias = nn.Embedding(films, 1)
        nn.init.normal_(self.seen.weight, std=0.3)
        nn.init.normal_(self.asked.weight, std=0.3)
        nn.init.zeros_(self.bias.weight)

    def forward(self, film, before, rated):
        taste = (self.seen(before) * rated[..., None]).mean(1)
        return (self.asked(film) * taste).sum(1) + self.bias(film)[:, 0]


def ratings(users: int, films: int, seed: int = 0):
    """Users and films with hidden tastes; ratings around 0. Each row: a film, five rated before it, and their ratings."""
    generator = torch.Generator().manual_seed(seed)
    of_films = torch.randn(films, 3, generator=generator)
    clients = []
    for _ in range(users):
        taste = torch.randn(3, generator=generator)
        chosen = torch.randperm(films, generator=generator)[:25]
        rating = torch.tanh(of_films[chosen] @ taste) + 0.1 * torch.randn(25, generator=generator)
        before, rated = chosen[:5].expand(20, 5), rating[:5].expand(20, 5)
        clients.append(({"film": chosen[5:], "before": before, "rated": rated}, rating[5:]))
    return clients


def main(small: bool = False) -> float:
    users, films = (150, 40) if small else (2000, 60)
    everybody = ratings(users + 50, films)
    held_out = everybody[users:]
    inputs = {name: torch.cat([x[name] for x, _ in held_out]) for name in ("film", "before", "rated")}
    run = train(
        Films(films),
        Federation.from_clients(everybody[:users]),
        cdp_fedexp(clip="adaptive", target_epsilon=8.0),
        local=AdamW(lr=0.03, steps=10),
        rounds=3 if small else 25,
        loss="mse",
        evaluate=(inputs, torch.cat([y for _, y in held_out])),
        execution=Execution(progress=not small),
    )
    first, last = run.history[0]["test_r2"], run.history[-1]["test_r2"]
    print(
        f"R² on users who took no part: {first:.3f} after one round, {last:.3f} at the end; ε = {run.privacy.epsilon_total:.3f}"
    )
    return last


if __name__ == "__main__":
    main(small="--small" in sys.argv)
