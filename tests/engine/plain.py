"""The plain per-client PyTorch loop that the simulator is held against: nothing of the simulator is used here."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD


def plain_update(
    model, x, y, *, lr, steps, proximal=0.0, correction=None, batches=None, optimizer=SGD, bound=None, rate=None
):
    """w⁽ᵗ'τ⁾ − w⁽ᵗ⁾ of one client with an optimizer of torch's, flat.

    `bound` is the largest norm of a gradient, and `rate(step)` what the rate is multiplied with.
    """
    local = copy.deepcopy(model)
    start = [p.detach().clone() for p in local.parameters()]
    optimizer = optimizer(local.parameters(), lr=lr)
    for step in range(steps):
        rows = slice(None) if batches is None else batches[step]
        optimizer.zero_grad()
        loss_of(local(x[rows]), y[rows]).backward()
        at = 0
        for p, w0 in zip(local.parameters(), start, strict=True):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            if proximal:
                p.grad += proximal * (p.detach() - w0)
            if correction is not None:
                p.grad += correction[at : at + p.numel()].view_as(p)
            at += p.numel()
        if bound is not None:
            nn.utils.clip_grad_norm_(local.parameters(), bound)
        if rate is not None:
            optimizer.param_groups[0]["lr"] = lr * rate(step)
        optimizer.step()
    return torch.cat([(p.detach() - w0).flatten() for p, w0 in zip(local.parameters(), start, strict=True)])


def loss_of(outputs, targets):
    return (
        0.5 * (outputs - targets).square().mean() if targets.is_floating_point() else F.cross_entropy(outputs, targets)
    )


class Transformer(nn.Module):
    """An embedding, one attention layer written out, and a classifier."""

    def __init__(self, vocabulary=11, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return self.head(x.mean(-2))


def cases():
    """name → (model, sampler of one client's data of n rows)"""
    torch.manual_seed(0)
    images = lambda n, g: (torch.randn(n, 1, 8, 8, generator=g), torch.randint(3, (n,), generator=g))  # noqa: E731
    vectors = lambda n, g: (torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g))  # noqa: E731
    tokens = lambda n, g: (torch.randint(11, (n, 5), generator=g), torch.randint(3, (n,), generator=g))  # noqa: E731
    values = lambda n, g: (torch.randn(n, 6, generator=g), torch.randn(n, generator=g))  # noqa: E731
    from reproduction.benchmarks.networks import lstm_classifier

    return {
        "linear": (nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), values),
        "mlp": (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), vectors),
        "cnn": (nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)), images),
        "groupnorm": (nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 3)), images),
        "lstm": (lstm_classifier(11, 4, 5, 3), tokens),
        "transformer": (Transformer(), tokens),
    }
