"""IDX files as their writers make them."""

from __future__ import annotations

import struct

import numpy as np

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx_bytes(array: np.ndarray) -> bytes:
    code = CODES[f"{array.dtype.kind}{array.dtype.itemsize}"]
    head = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()
