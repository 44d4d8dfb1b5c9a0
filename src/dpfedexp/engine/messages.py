"""Text from rank 0 to all ranks, as bytes: nothing that a rank receives is code."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dpfedexp.errors import RoundFailed

LONGEST = 2**30


def send_text(text: str) -> None:
    """Rank 0 calls this where the others call `receive_text`."""
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    dist.broadcast(torch.tensor([len(data)]), src=0)
    dist.broadcast(data, src=0)


def receive_text() -> str:
    length = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(length, src=0)
    if not 0 < int(length) <= LONGEST:
        raise RoundFailed(f"rank 0 announced a message of {int(length)} bytes; it must have between 1 and {LONGEST}.")
    data = torch.zeros(int(length), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return data.numpy().tobytes().decode()
