"""A short model's server lives on the processor, whatever trains: the same runs, and the same resumed."""

import pytest
import torch

from dpfedexp import AdaptiveClip, cdp_fedexp, dp_scaffold, ldp_fedexp
from dpfedexp.algorithms.round import SHORT, server_device
from tests.engine.small import Crash, crash_after, small_run, weights

CPU, OTHER_DEVICE = torch.device("cpu"), torch.device("meta")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

ALGORITHMS = {
    "adaptive": cdp_fedexp(clip=AdaptiveClip(initial=0.3), noise_multiplier=1.0),
    "privunit": ldp_fedexp(clip=0.3, mechanism="privunit"),
    "scaffold": dp_scaffold(clip=0.3, noise_multiplier=1.0),
}


def test_long_vectors_stay_where_clients_train():
    assert server_device(SHORT + 1, OTHER_DEVICE) == OTHER_DEVICE
    assert server_device(SHORT, OTHER_DEVICE) == CPU
    assert server_device(SHORT + 1, CPU) == CPU
    assert server_device(100_000, OTHER_DEVICE) == CPU


def trained(name, device, **options):
    run = small_run(algorithm=ALGORITHMS[name], execution=device, **options)
    return run, weights(run).cpu()


@needs_gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("longest", [SHORT, 0], ids=["server on the processor", "server on the GPU"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_gpu_trains_what_a_processor_trains(name, longest, monkeypatch):
    monkeypatch.setattr("dpfedexp.algorithms.round.SHORT", longest)
    (there, w), (here, right) = (trained(name, device) for device in ("cuda", "cpu"))
    assert torch.allclose(w, right, rtol=1e-3, atol=1e-4)
    assert [r["eta_g"] for r in there.history] == pytest.approx([r["eta_g"] for r in here.history], rel=1e-3)


@needs_gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["adaptive", "scaffold"])
def test_a_resumed_run_on_a_gpu_is_the_same(name, tmp_path):
    with pytest.raises(Crash):
        trained(name, "cuda", on_round=crash_after(3), out=tmp_path / "run")
    _, w = trained(name, "cuda", out=tmp_path / "run")
    assert torch.equal(w, trained(name, "cuda")[1])
