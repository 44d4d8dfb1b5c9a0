"""What clients 0, 1, … send in one round of a mechanism, and its sum; in one process."""

import torch

from dpfedexp.core.clipping import clip
from dpfedexp.core.noise import Streams


def reports(mechanism, updates, noise=None, **more):
    noise = Streams(0).at("local noise", 1) if noise is None else noise
    return mechanism.randomize(clip(updates, mechanism.clip), torch.arange(len(updates)), noise, **more)


def collected(mechanism, updates, noise=None, **more):
    return mechanism.collect(reports(mechanism, updates, noise, **more))
