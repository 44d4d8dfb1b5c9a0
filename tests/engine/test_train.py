"""What `train` is given is checked before the first round, and answered with where it belongs."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from dpfedexp import Execution, Federation, FixedSize, InputError, Sgd, cdp_fedexp, train
from dpfedexp.accounting import Ledger
from dpfedexp.engine.checkpoint import read_progress

PRIVATE = cdp_fedexp(clip=0.5, noise_multiplier=1.0)


def federation(clients: int = 6) -> Federation:
    generator = torch.Generator().manual_seed(0)
    return Federation.from_clients(
        [(torch.randn(4, 3, generator=generator), torch.randn(4, generator=generator)) for _ in range(clients)]
    )


def run(clients=None, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
    given = {"local": Sgd(lr=0.1, steps=1), "rounds": 2, "device": "cpu", "progress": False} | options
    return train(model, federation() if clients is None else clients, PRIVATE, **given)


@pytest.mark.parametrize(
    ("name", "value"), [("chunk_size", 3), ("trainer", "loop"), ("precision", "bf16"), ("memory", "4GB")]
)
def test_a_field_of_the_execution_is_sent_to_its_place(name, value):
    with pytest.raises(InputError, match=rf"train has no argument {name!r}. Write execution=Execution\({name}="):
        run(**{name: value})


def test_the_signature_is_the_one_that_the_docs_show():
    names = list(inspect.signature(train).parameters)
    assert names[:5] == ["model", "clients", "algorithm", "local", "rounds"]
    assert not {"chunk_size", "trainer", "precision", "memory"} & set(names)
    documented = inspect.getdoc(train)
    assert all(f"    {name}: " in documented for name in names)


def test_a_device_and_an_execution_that_differ_are_an_error():
    with pytest.raises(InputError, match="give one of them"):
        run(device="cpu", execution=Execution(device="cuda"))
    assert len(run(execution=Execution(chunk_size=2)).history) == 2


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        ((5, 4), (5,), r"test has inputs of shape \(5, 4\) and targets of shape \(5,\), which do not fit the model"),
        ((5, 3), (5, 2), "which do not fit the model and its loss"),
        ((5, 3), (4,), "5 inputs and 4 targets"),
        ((0, 3), (0,), "at least 1"),
    ],
)
def test_a_test_set_that_does_not_fit_is_a_sentence_before_anything_is_charged(inputs, targets, words):
    ledger = Ledger.in_memory()
    with pytest.raises(InputError, match=words):
        run(test=(torch.zeros(inputs), torch.zeros(targets)), ledger=ledger)
    assert len(ledger) == 0


def test_clients_that_can_not_cast_a_test_set_ask_for_a_function_instead():
    class Own:
        """What the simulator asks of clients, and no more."""

        def __init__(self) -> None:
            inner = federation()
            self.sizes, self.gather = inner.sizes, inner.gather

        def __len__(self) -> int:
            return len(self.sizes)

    with pytest.raises(InputError, match=r"Own has no method prepare .* give evaluate"):
        run(Own(), test=(torch.zeros(5, 3), torch.zeros(5)))
    assert len(run(Own(), evaluate=lambda model: {"size": 1.0}).history) == 2


def test_counts_may_be_numpys_and_are_recorded_as_pythons_own(tmp_path):
    options = {"local": Sgd(lr=0.1, steps=np.int64(2)), "participation": FixedSize(np.int64(4))}
    whole = run(rounds=np.int64(3), evaluate_every=np.int32(2), checkpoint=tmp_path, **options)
    assert len(whole.history) == 3
    settings = read_progress(tmp_path).settings
    assert (settings["rounds"], settings["evaluate_every"], settings["local.steps"]) == (3, 2, 2)
    again = run(
        local=Sgd(lr=0.1, steps=2),
        participation=FixedSize(4),
        rounds=3,
        evaluate_every=2,
        checkpoint=tmp_path,
        resume=True,
    )
    assert again.history == whole.history
