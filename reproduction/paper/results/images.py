"""Which images a run saw, as a fingerprint: another data set in MNIST's place gives other runs."""

from __future__ import annotations

import hashlib
from functools import cache

from dpfedexp.data import load_mnist

MNIST = "06b0d1f124c4e5fa796686ade41a9b77"
"""The fingerprint of MNIST itself, whose numbers the paper prints."""


@cache
def fingerprint(folder: str | None) -> str:
    """A hash of the images and labels that `folder`, or the usual places, hold."""
    images = load_mnist(folder)
    digest = hashlib.sha256()
    for part in (images.train_images, images.train_labels, images.test_images, images.test_labels):
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]
