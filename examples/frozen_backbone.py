"""A pretrained network, frozen with its batch normalization, and a new head: few parameters, little noise.

python examples/frozen_backbone.py
"""

import sys

import torch
from torch import nn

from dpfedexp import Execution, Federation, fit
from dpfedexp.accounting import noise


def backbone() -> nn.Module:
    """Stands for a download: convolutions and batch normalization with statistics of other data."""
    torch.manual_seed(0)
    layers = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network.train()(torch.randn(256, 3, 16, 16))
    return network


def main(small: bool = False) -> float:
    body = backbone().eval().requires_grad_(False)
    model = nn.Sequential(body, nn.Linear(64, 4)).eval()
    count, generator = 100 if small else 500, torch.Generator().manual_seed(1)
    patterns = torch.randn(4, 3, 16, 16, generator=generator)

    def images(rows):
        labels = torch.randint(0, 4, (rows,), generator=generator)
        return patterns[labels] + 1.5 * torch.randn(rows, 3, 16, 16, generator=generator), labels

    run = fit(
        model,
        Federation.from_clients([images(4 if small else 8) for _ in range(count)]),
        epsilon=8.0,
        rounds=3 if small else 25,
        evaluate=images(400),
        execution=Execution(progress=not small),
    )
    accuracy = run.history[-1]["test_accuracy"]
    whole, head = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model[1].parameters())
    z = noise(8.0, rounds=len(run.history), delta=1e-5)
    print(
        f"accuracy {accuracy:.3f}, ε = {run.privacy.epsilon_total:.3f}. Noise over clip z√d/M: {z * head**0.5 / count:.2f} for the "
        f"{head} parameters of the head, {z * whole**0.5 / count:.2f} for all {whole}."
    )
    return accuracy


if __name__ == "__main__":
    main(small="--small" in sys.argv)
