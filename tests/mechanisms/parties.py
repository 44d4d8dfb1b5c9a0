"""Clients, a server and a helper of one two-party round, in one process and over real files."""

import secrets
from pathlib import Path

import torch

from dpfedexp.accounting import Ledger
from dpfedexp.core.noise import to_words
from dpfedexp.flower.guard import HelperFile
from dpfedexp.mechanisms.aggregation import PrivateKey, RoundBinding, mask_row, new_key
from dpfedexp.mechanisms.serialization import encode
from dpfedexp.mechanisms.two_party import TwoPartyGaussian

from .one_round import reports

D, CLIENTS = 5, 8
MECHANISM = TwoPartyGaussian(clip=0.5, noise_multiplier=2.0, numerator="free")
FILE = """\
private_key = "helper.key"
min_clients = {min_clients}
max_epsilon_per_round = {per_round}
max_epsilon_total = {total}
delta = 1e-5
mechanisms = ["two-party"]
max_clip = {max_clip}
"""


def helper_file(folder: Path, *, min_clients=4, per_round=10.0, total=50.0, max_clip=1.0) -> HelperFile:
    if not (folder / "helper.key").exists():
        new_key(folder / "helper.key")
    limits = {"min_clients": min_clients, "per_round": per_round, "total": total, "max_clip": max_clip}
    (folder / "helper.toml").write_text(FILE.format(**limits), encoding="utf-8")
    return HelperFile.load(folder / "helper.toml")


def public_key(file: HelperFile) -> str:
    return PrivateKey.load(file.private_key).public


def round_of(mechanism=MECHANISM, number=1, run="run", nonce=None, columns=None) -> RoundBinding:
    nonce = secrets.token_hex(16) if nonce is None else nonce
    columns = mechanism.columns(D) if columns is None else columns
    return RoundBinding(run, number, nonce, columns, mechanism.clip, encode(mechanism))


def rows(mechanism=MECHANISM, seed=0) -> torch.Tensor:
    return mechanism.units(reports(mechanism, torch.randn(CLIENTS, D, generator=torch.Generator().manual_seed(seed))))


def sent(round_: RoundBinding, key: str, units: torch.Tensor, first=100):
    """What the clients send: node → masked row and sealed seed."""
    return {first + i: mask_row(to_words(row), round_, first + i, key) for i, row in enumerate(units)}


def seeds(messages, nodes=None):
    return [(node, message.sealed) for node, message in messages.items() if nodes is None or node in nodes]


def charges(file: HelperFile) -> int:
    if not file.ledger.exists():
        return 0
    with Ledger.open(file.ledger, read_only=True) as ledger:
        return len(ledger)
