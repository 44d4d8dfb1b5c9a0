"""Configuration files and overrides: a run's settings, or one sentence."""

from __future__ import annotations

import contextlib
import tempfile
import tomllib
from pathlib import Path

from tests.fuzz.harness import fuzz, instrumented

with instrumented():
    from dpfedexp import config
    from dpfedexp.accounting import Sampling
    from dpfedexp.cli.train import TEMPLATE
    from dpfedexp.errors import InputError

FOLDER = Path(tempfile.mkdtemp())
SEEDS = [
    TEMPLATE.format(name="run.toml").encode(),
    b'[algorithm]\nname = "ldp_fedexp"\nclip = 0.3\nmechanism = "privunit"\nepsilon0 = 1.0\n[run]\nrounds = 3\n',
    b'[algorithm]\nname = "dp_scaffold"\nclip = 1\nnoise_multiplier = 5\n[participation]\nkind = "poisson"\nrate = 0.1\n',
    b'[data]\nkind = "npz"\npath = "x.npz"\n[model]\nname = "mlp"\noptions = { inputs = 3 }\n\0algorithm.clip=0.5\0run.seed=1',
    b'algorithm = { name = "cdp_fedexp", clip = "adaptive", target_epsilon = 8 }\n\0algorithm.adaptive.rate=0.1',
]


def one(data: bytes) -> None:
    """The file, and after a zero byte the values of --set."""
    text, *overrides = data.split(b"\0")
    path = FOLDER / "run.toml"
    path.write_bytes(text)
    with contextlib.suppress(InputError):
        settings = config.load(path, [override.decode("utf-8", "surrogateescape") for override in overrides])
        settings.check()
        local, participation = settings.build_local(), settings.build_participation()
        mechanism = settings.build_algorithm().bind(7, participation.expected(100), Sampling(), 3)
        assert mechanism.event(Sampling())
        assert local
        config.parse(tomllib.loads(settings.to_toml()))


if __name__ == "__main__":
    fuzz(one, SEEDS)
