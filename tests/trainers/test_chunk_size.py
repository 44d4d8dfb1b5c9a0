import resource
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from dpfedexp import Execution, InputError, Sgd, dp_scaffold, fedavg, train
from dpfedexp import machine as rows
from dpfedexp.engine import simulated as engine
from dpfedexp.engine.prepare import prepare
from dpfedexp.trainers import chunk_size as chunk
from tests.sizes import long, sized
from tests.trainers.shared import labeled, secured, simulated


def federation(clients=6, size=4):
    return labeled((5,), [size] * clients)


def net():
    return nn.Sequential(nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("text", "size"), [("4GB", 4e9), ("512MiB", 2**29), ("1.5 kb", 1500), (10**6, 10**6), ("2000", 2000), (None, None)]
)
def test_memory_is_bytes_with_or_without_a_unit(text, size):
    assert chunk.parse_memory(text) == size


@pytest.mark.parametrize("text", ["4 apples", "-1GB", "", "0", 0, True, "GB"])
def test_memory_that_is_no_size_is_one_sentence(text):
    with pytest.raises(InputError, match="memory is"):
        chunk.parse_memory(text)


def test_a_budget_decides_the_chunk_and_not_the_result():
    given, options = (net(), federation(), fedavg()), {"local": Sgd(lr=0.1, steps=2), "rounds": 2}
    one = chunk.footprint(simulated(*given[:2], options["local"]).task).bytes
    hows = [Execution("cpu", memory=n * one) for n in (0.5, 1, 3.5, 100)]
    assert [prepare(*given, execution=how, **options)[0].cohort.chunk_size for how in hows] == [1, 1, 3, 6]
    runs = [train(*given, execution=how, **options) for how in hows[1::2]]
    assert torch.allclose(runs[0].model[0].weight, runs[1].model[0].weight, atol=1e-6)


def test_trained_in_tiles_only_the_clients_in_flight_count_their_activations():
    model = nn.Sequential(nn.Linear(5, 400), nn.Linear(400, 3))
    task = simulated(model, federation(20, 50), Sgd(lr=0.1, steps=1)).task
    budget = 10 * chunk.footprint(task).bytes
    assert chunk.automatic_chunk(task, budget, in_flight=2) > chunk.automatic_chunk(task, budget)


@pytest.mark.parametrize("bound", [{"batch_size": 8}, {"max_examples": 8}])
def test_a_client_counts_with_the_rows_that_it_uses_and_few_rows_make_large_tiles(bound):
    task = simulated(net(), federation(2, 1000), Sgd(lr=0.1, steps=1, **bound)).task
    assert chunk.footprint(task).rows == 8
    trainer = simulated(net(), federation(2, 1000), Sgd(lr=0.1, steps=1), "fast").trainer
    assert trainer.tile_of(1) > 10 * trainer.tile_of(1000) > 0
    assert trainer.tile_of(1000) == trainer.tile_of(10**6) == trainer.tile


def test_a_large_model_gets_room_for_every_core(monkeypatch):
    task = simulated(net(), federation(), Sgd(lr=0.1, steps=1)).task
    monkeypatch.setattr(chunk, "CPU_BUDGET", chunk.footprint(task).bytes)
    assert chunk.automatic_chunk(task) == min(6, 2 * torch.get_num_threads())


def test_scaffolds_rows_on_disk_give_the_run_of_rows_in_memory(monkeypatch):
    given = net(), federation(), dp_scaffold(clip=0.3, noise_multiplier=1.0)
    options = {"local": Sgd(lr=0.1, steps=2), "rounds": 3, "execution": "cpu"}
    in_memory = train(*given, **options)
    monkeypatch.setattr(engine, "zero_rows", lambda count, width: rows.zero_rows(count, width, most=0))
    on_disk = train(*given, **options)
    assert torch.equal(in_memory.model[0].weight, on_disk.model[0].weight)


def test_rows_that_do_not_fit_are_pages_of_a_file_that_takes_no_room_until_written():
    mapped = rows.zero_rows(10**6, 10**4, most=0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mapped[[3, 999_999]] = torch.ones(2, 10**4)
    assert float(mapped[999_999].sum()) == 10**4
    assert float(mapped[500_000].sum()) == 0.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_rows_without_room_anywhere_are_one_sentence(monkeypatch):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(rows.tempfile, "NamedTemporaryFile", full)
    with pytest.raises(InputError, match="TMPDIR"):
        rows.zero_rows(10, 10, most=0)


@long
def test_peak_memory_is_flat_from_hundreds_to_many_more_clients_at_equal_budget():
    """Without the budget the second peak is 1.23 times the first."""
    program = """
import resource, sys, torch
torch.set_num_threads(1)
from dpfedexp import Execution, Sgd, ldp_fedexp, train
from dpfedexp.models import linear_regression
from tests.generated import GeneratedClients
clients = GeneratedClients(int(sys.argv[1]), 1, lambda ids: (torch.randn(len(ids), 1, 2000), torch.randn(len(ids), 1)))
algorithm = ldp_fedexp(clip=0.3, noise_multiplier=0.7)
given = {'local': Sgd(lr=0.001, steps=2), 'rounds': 1, 'execution': Execution(memory='1MB', progress=False)}
train(linear_regression(2000), clients, algorithm, **given)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    peaks = [
        int(subprocess.run([sys.executable, "-c", program, str(m)], capture_output=True, text=True, check=True).stdout)
        for m in (200, sized(2_000, 20_000))
    ]
    assert peaks[1] < 1.1 * peaks[0]


def test_the_chunk_of_a_secure_run_does_not_follow_what_memory_the_data_left_free(monkeypatch):
    given = net(), federation(), Sgd(lr=0.1, steps=1, max_examples=4)
    monkeypatch.setattr(chunk, "CPU_BUDGET", 1)
    sizes = {}
    for secure in (False, True):
        for free in (2**40, 4 * 1000):
            monkeypatch.setattr(chunk, "available_memory", lambda free=free: free)
            sizes[secure, free] = secured(*given, secure=secure).chunk_size
    assert sizes[False, 2**40] > sizes[False, 4 * 1000]
    assert sizes[True, 2**40] == sizes[True, 4 * 1000]
