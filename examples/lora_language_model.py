"""Fine-tuning a small language model by adapters alone: what that saves in parameters, noise and memory.

python examples/lora_language_model.py
"""

import sys

import torch
from torch import nn

from dpfedexp import AdamW, Federation, cdp_fedexp, train
from dpfedexp.accounting import noise

WORDS, LENGTH = 50, 12


class Lora(nn.Module):
    """W x + B(A x) with W frozen (Hu et al. 2022); B begins at zero."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Language(nn.Module):
    """A decoder of one block: causal attention, a feed-forward layer, and the words again."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, text):
        x = self.words(text) + self.places.weight[: text.shape[1]]
        q, k, v = self.qkv(self.first(x)).chunk(3, dim=-1)
        x = x + self.mix(
            nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        )
        x = x + self.down(torch.relu(self.up(self.second(x))))
        return x @ self.words.weight.T


def sentences(rows: int, jump: int, generator: torch.Generator):
    """Each word follows from the one before, but for a tenth of noise: `jump` is the language."""
    text = torch.randint(0, WORDS, (rows, 1), generator=generator)
    for _ in range(LENGTH):
        free = torch.randint(0, WORDS, (rows, 1), generator=generator)
        follow = (text[:, -1:] + jump) % WORDS
        text = torch.cat([text, torch.where(torch.rand(rows, 1, generator=generator) < 0.1, free, follow)], dim=1)
    return text[:, :-1], text[:, 1:]


def main(small: bool = False) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Language()
    # Stands for a download: trained on public sentences of a language of its own.
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(50 if small else 300):
        x, y = sentences(64, 1, generator)
        loss = nn.functional.cross_entropy(model(x).movedim(-1, 1), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    whole = sum(p.numel() for p in model.parameters())
    model.requires_grad_(False)
    model.qkv, model.mix, model.up, model.down = (
        Lora(part, 4) for part in (model.qkv, model.mix, model.up, model.down)
    )
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)

    users = 100 if small else 1000
    run = train(
        model,
        Federation.from_clients([sentences(8, 3, generator) for _ in range(users)]),
        cdp_fedexp(clip="adaptive", target_epsilon=8.0),
        local=AdamW(lr=0.01, steps=5),
        rounds=3 if small else 40,
        loss="cross-entropy",
        test=sentences(200, 3, generator),
        progress=not small,
    )
    z = noise(8.0, rounds=50, delta=1e-5)
    print(
        f"adapters: {adapters:,} of {whole + adapters:,} parameters; noise over clip {z * adapters**0.5 / users:.2f} instead of "
        f"{z * whole**0.5 / users:.2f}; a chunk of {users} clients holds {4e-6 * users * adapters:.0f} MB of parameters instead of "
        f"{4e-6 * users * whole:.0f}"
    )
    before, after = run.history[0]["test_accuracy"], run.history[-1]["test_accuracy"]
    print(
        f"next words right: {before:.1%} after one round, {after:.1%} at the end; ε = {run.privacy.epsilon_total:.3f}"
    )
    return adapters / whole, after


if __name__ == "__main__":
    main(small="--small" in sys.argv)
