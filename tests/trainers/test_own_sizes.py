"""Clients without a public bound on their rows: which sizes there are decides nothing for other clients.

Programs are recorded for powers of two. A program that acts on the number of its rows could be refused, or be another one for all,
because one client is larger than the rest.
"""

import pytest
import torch
from torch.nn import functional as F

from dpfedexp import Federation, InputError, Sgd
from tests.trainers.shared import one_round, secured
from tests.trainers.test_apart import net

COUNT = 5


pytestmark = pytest.mark.usefixtures("same_streams")


def clients(large: bool, transform=None):
    """The first client has 3 rows or 20."""
    generator = torch.Generator().manual_seed(0)
    held = [
        (torch.randn(3, 5, generator=generator), torch.randint(0, 3, (3,), generator=generator)) for _ in range(COUNT)
    ]
    if large:
        held[0] = (torch.ones(20, 5), torch.zeros(20).long())
    return Federation.from_clients(held, transform=transform)


def others(large: bool, transform=None, **options):
    return one_round(secured(net(), clients(large, transform), Sgd(lr=0.5, steps=2), **options))[1:]


def looks(above: int, upto: int = 1000):
    """A loss that looks at values where it is given so many rows."""

    def loss(outputs, y):
        if above < len(y) <= upto and outputs.mean().item() > 100:
            outputs = -outputs
        return F.cross_entropy(outputs, y, reduction="none")

    return loss


@pytest.mark.parametrize("large", [False, True])
def test_a_program_that_looks_at_values_of_few_rows_is_refused_whatever_the_clients_hold(large):
    """It ended with an exception of torch's recording, or of another sentence."""
    with pytest.raises(InputError, match="looks at values while it runs"):
        others(large, loss=looks(0, 1))
    with pytest.raises(InputError, match="looks at values while it runs"):
        others(large, loss=looks(4))


def test_a_client_that_is_too_large_for_a_program_learns_nothing_and_ends_no_run():
    """A run was refused or not, as one client was large or not."""
    assert torch.equal(others(False, loss=looks(16)), others(True, loss=looks(16)))
    assert float(others(True, loss=looks(16)).abs().max()) > 0


def test_a_transform_that_was_given_many_rows_is_the_same_one_for_few():
    """One client's size moved all other clients' rows."""

    def remembers():
        seen: list[int] = []

        def transform(x):
            seen.extend([1] * (len(x) > 16))
            return x * (1 + len(seen))

        return transform

    assert torch.equal(others(False, remembers()), others(True, remembers()))


def test_whether_a_transform_is_vectorised_does_not_follow_from_one_clients_size():
    """`vmap` refused the rows of the first client, and all others were then computed one by one, which rounds otherwise."""
    mixed = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))

    def transform(x):
        if len(x) > 16:
            x = x * x.mean().item()
        return (x @ mixed).softmax(-1) @ mixed

    assert torch.equal(others(False, transform), others(True, transform))
