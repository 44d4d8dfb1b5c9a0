"""What follows a release, against hand-written equations: step size, move, next clip, and the control variate of SCAFFOLD."""

from dataclasses import replace

import pytest
import torch

from dpfedexp.algorithms import cdp_fedexp, dp_fedavg, dp_scaffold
from dpfedexp.algorithms.round import State, advance
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.sums import WITHIN_CLIP
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import CentralGaussian, Release

W = torch.tensor([1.0, -2.0], dtype=torch.float64)
MEANS = [torch.tensor(row, dtype=torch.float64) for row in ([0.3, -0.1], [0.2, 0.4], [-0.5, 0.1])]
MECHANISM = CentralGaussian(clip=1.0, noise_multiplier=2.0)


def start(**fields):
    return State(round=0, w=W, recent=(W,), radius=1.0, server={}, **fields)


def test_a_round_moves_the_model_by_the_step_size_times_the_mean():
    state, eta_g = advance(dp_fedavg(clip=1.0, noise_multiplier=2.0, server_rate=1.5), release(MEANS[0]), start())
    assert eta_g == 1.5
    assert state.round == 1
    torch.testing.assert_close(state.w, W + 1.5 * MEANS[0], rtol=1e-15, atol=0.0)
    assert (state.radius, state.server, state.control) == (1.0, {}, None)


def test_the_reported_model_is_the_mean_of_the_newest_iterates_and_of_no_older_one():
    algorithm = replace(dp_fedavg(clip=1.0, noise_multiplier=2.0), average_last=2)
    state = start()
    iterates = [W]
    for mean in MEANS:
        state, _ = advance(algorithm, release(mean), state)
        iterates.append(iterates[-1] + mean)
        torch.testing.assert_close(state.reported, (iterates[-1] + iterates[-2]) / 2, rtol=1e-14, atol=1e-15)
        assert len(state.recent) == 2
    last, _ = advance(replace(algorithm, average_last=1), release(MEANS[0]), start())
    assert last.reported is last.w


def test_an_adaptive_clip_moves_by_its_own_rule_and_reaches_the_mechanism():
    algorithm = cdp_fedexp(clip=AdaptiveClip(initial=1.0), noise_multiplier=2.0)
    state, _ = advance(algorithm, Release(MEANS[0], 0.5, {WITHIN_CLIP: 0.9}, 1.0), start())
    assert state.radius == algorithm.clip.update(1.0, 0.9)
    assert state.radius < 1.0  # nine in ten were within, more than the rule's median
    assert MECHANISM.at_radius(state.radius).clip == state.radius
    assert MECHANISM.at_radius(state.radius).noise_multiplier == MECHANISM.noise_multiplier
    assert MECHANISM.at_radius(1.0) is MECHANISM, "while the clip stays"


@pytest.mark.parametrize(("known", "share"), [({}, 1.0), ({"share": 1.0}, 1.0), ({"share": 0.25}, 0.25)])
def test_scaffolds_server_control_forgets_by_the_share_that_took_part_which_is_everybody_unless_said(known, share):
    algorithm = dp_scaffold(clip=1.0, noise_multiplier=2.0)
    own = torch.ones(4, 2)
    tau_eta_l, control = 0.6, torch.full((2,), 7.0, dtype=torch.float64)
    state = start(control=control, client_controls=own)
    for mean in MEANS:
        state, _ = advance(algorithm, release(mean), state, **known, tau_eta_l=tau_eta_l)
        # c ← c + (share)·(mean of c_i⁺ − c over the cohort), and that mean is −c − c̄/(τη_l).
        control = control + share * (-control - mean / tau_eta_l)
        torch.testing.assert_close(state.control, control, rtol=1e-13, atol=1e-15)
    assert state.client_controls is own


def release(mean):
    return Release(mean, None, {}, 1.0)


def test_what_a_release_or_a_caller_leaves_out_is_a_sentence():
    """Errors and no asserts, so that `python -O` says the same."""
    adaptive = cdp_fedexp(clip=AdaptiveClip(initial=1.0), noise_multiplier=2.0)
    with pytest.raises(InputError, match="the release has no vote on the updates within it"):
        advance(adaptive, Release(MEANS[0], 0.5, {}, 1.0), start())
    with pytest.raises(InputError, match="tau_eta_l is missing"):
        advance(dp_scaffold(clip=1.0, noise_multiplier=2.0), release(MEANS[0]), start(control=W))
