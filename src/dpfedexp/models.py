"""The paper's networks and a few general ones, all of which `torch.func.vmap` can trace."""

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpfedexp.errors import nearest, require


def mnist_cdp_net() -> nn.Sequential:
    """The paper's network for central privacy, d = 5046; its only ReLU is between the linear layers."""
    features = nn.Conv2d(1, 4, 4), nn.MaxPool2d(2), nn.Conv2d(4, 8, 4), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*features, nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 10))


def mnist_ldp_net() -> nn.Sequential:
    """The paper's network for local privacy, d = 237; it has no ReLU at all."""
    features = nn.Conv2d(1, 2, 4), nn.MaxPool2d(2), nn.Conv2d(2, 1, 4), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*features, nn.Linear(16, 10))


def mnist_relu_net() -> nn.Sequential:
    """The CDP network with a ReLU after each convolution, d = 5046; better conditioned on standardized inputs."""
    return _with_relus(nn.Conv2d(1, 4, 4), nn.Conv2d(4, 8, 4), nn.Linear(128, 32))


def cifar_net() -> nn.Sequential:
    """Two convolutions and two linear layers for 32×32 images in color, d = 16,986."""
    return _with_relus(nn.Conv2d(3, 8, 5), nn.Conv2d(8, 16, 5), nn.Linear(400, 32))


def _with_relus(first: nn.Conv2d, second: nn.Conv2d, hidden: nn.Linear) -> nn.Sequential:
    features = first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*features, hidden, nn.ReLU(), nn.Linear(hidden.out_features, 10))


class LinearRegression(nn.Linear):
    """The model x ↦ xᵀw, one number per row."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze(-1)


def linear_regression(dimension: int) -> LinearRegression:
    """Return the linear model of the paper's synthetic problem, with w⁰ = 0."""
    model = LinearRegression(dimension, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def linear(inputs: int, outputs: int = 1) -> nn.Sequential:
    """Return the model x ↦ Wx + b on flattened inputs, with zero weights; with one output, it returns one number per row."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer, *([nn.Flatten(0)] if outputs == 1 else []))


def mlp(inputs: int, hidden: int | Sequence[int], classes: int) -> nn.Sequential:
    """Return linear layers with ReLU between them, on flattened inputs; `hidden` is one width or several."""
    widths = [inputs, *([hidden] if isinstance(hidden, int) else hidden)]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


MODELS: dict[str, Callable[..., nn.Module]] = {
    factory.__name__: factory
    for factory in (mnist_cdp_net, mnist_ldp_net, mnist_relu_net, cifar_net, linear_regression, linear, mlp)
}


def build(name: str, seed: int, **settings: Any) -> nn.Module:
    """Build a network by name; its initial parameters depend on `seed` alone, and torch's global generator is not changed."""
    require(name in MODELS, f"model is {name!r}, which is unknown.{nearest(name, MODELS)}")
    factory = MODELS[name]
    known = inspect.signature(factory).parameters
    for setting in settings:
        hint = nearest(setting, known) if known else " It takes no settings."
        require(setting in known, f"model {name!r} has no setting {setting!r}.{hint}")
    missing = [given for given, its in known.items() if its.default is its.empty and given not in settings]
    require(not missing, f"model {name!r} needs {', '.join(missing)}.")
    for setting, value in settings.items():
        numbers = value if isinstance(value, list | tuple) and setting == "hidden" and name == "mlp" else [value]
        require(
            all(isinstance(number, int) and not isinstance(number, bool) and number >= 1 for number in numbers),
            f"model {name!r} has {setting} = {value!r}; it must be a whole number of at least 1.",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory(**settings)
