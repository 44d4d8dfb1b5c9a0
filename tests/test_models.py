"""Networks by name: their sizes, their gradients under vmap, and a start that follows from the seed."""

import pytest
import torch
from torch.func import functional_call, grad, stack_module_state, vmap

from dpfedexp.errors import InputError
from dpfedexp.models import MODELS, build

IMAGE = (2, 1, 28, 28)
CASES: dict = {
    "mnist_cdp_net": ({}, IMAGE, 5046),
    "mnist_ldp_net": ({}, IMAGE, 237),
    "mnist_relu_net": ({}, IMAGE, 5046),
    "cifar_net": ({}, (2, 3, 32, 32), 16_986),
    "linear_regression": ({"dimension": 7}, (2, 7), 7),
    "linear": ({"inputs": 12, "outputs": 3}, (2, 3, 4), 3 * 13),
    "mlp": ({"inputs": 12, "hidden": [8, 6], "classes": 3}, (2, 3, 4), 12 * 8 + 8 + 8 * 6 + 6 + 21),
}
"""Settings, the shape of a batch, and how many parameters there are."""


@pytest.mark.parametrize("name", list(MODELS))
def test_models_have_the_stated_number_of_parameters_and_vmap_over_clients_equals_the_loop(name: str) -> None:
    settings, shape, size = CASES[name]
    models = [build(name, seed, **settings) for seed in range(2)]
    assert sum(parameter.numel() for parameter in models[0].parameters()) == size
    torch.manual_seed(0)
    inputs = torch.randn(2, *shape)
    # Random numbers on top, because some models start at zero.
    stacked = {key: value + 0.1 * torch.randn_like(value) for key, value in stack_module_state(models)[0].items()}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(models[0], weights, (x,)).square().sum()

    gradients = vmap(grad(loss))(stacked, inputs)
    for number in range(2):
        alone = grad(loss)({key: value[number] for key, value in stacked.items()}, inputs[number])
        for key, expected in alone.items():
            # Float32 rounding: batched kernels sum in another order, over at most 10^5 terms.
            scale = expected.abs().max().item()
            torch.testing.assert_close(gradients[key][number], expected, rtol=1e-3, atol=1e-4 * scale + 1e-7)


def test_a_seed_decides_the_start_and_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    first, other = build("mnist_cdp_net", 1), build("mnist_cdp_net", 2)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(5)
    again = build("mnist_cdp_net", 1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("mnist_cpd_net", {}, "model is 'mnist_cpd_net', which is unknown. Did you mean 'mnist_cdp_net'"),
        ("mnist_cdp_net", {"classes": 3}, "has no setting 'classes'. It takes no settings"),
        ("mlp", {"inputs": 3, "hiden": 4, "classes": 2}, "has no setting 'hiden'. Did you mean 'hidden'"),
        ("mlp", {"inputs": 3}, "model 'mlp' needs hidden, classes"),
        ("mlp", {"inputs": 3, "hidden": [4, 0], "classes": 2}, r"hidden = \[4, 0\]; it must be a whole number"),
        ("linear_regression", {"dimension": -1}, "dimension = -1; it must be a whole number of at least 1"),
    ],
)
def test_a_model_that_cannot_be_built_gets_a_sentence(name: str, settings: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        build(name, 0, **settings)
