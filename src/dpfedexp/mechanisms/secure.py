"""Noise that an attacker can't predict and can't see through: from the operating system, on a grid.

`secure_mechanism` puts a mechanism on the grid, `ChaChaNoise` is where its randomness comes from; `train(..., secure=True)`
uses both.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

from dpfedexp.errors import InputError, require
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, Mechanism, PrivUnit
from dpfedexp.mechanisms.secure_gaussian import SecureCentralGaussian, SecureLocalGaussian
from dpfedexp.mechanisms.secure_privunit import SecurePrivUnit

Secure = bool | Literal["strict"]


def secure_mechanism(mechanism: Mechanism, strict: bool = False) -> Mechanism:
    """The same mechanism on an integer grid: the same fields, protocol and adjacency.

    Formal guarantee: that of `mechanism`; what is charged says where the grid costs anything. `strict` takes exact discrete
    Gaussian noise, which leaves nothing to the quality of floating-point sampling and is far slower.

    >>> secure_mechanism(CentralGaussian(clip=0.3, noise_multiplier=5.0)).clip
    0.3
    """
    given = {field.name: getattr(mechanism, field.name) for field in fields(mechanism)}  # type: ignore[arg-type]
    match mechanism:
        case SecureCentralGaussian() | SecureLocalGaussian() | SecurePrivUnit():
            return mechanism
        case CentralGaussian():
            return SecureCentralGaussian(**given, strict=strict)
        case LocalGaussian():
            return SecureLocalGaussian(**given, strict=strict)
        case PrivUnit():
            require(not strict, "secure is 'strict' with PrivUnit, which draws no Gaussian noise; use secure = true.")
            return SecurePrivUnit(**given)
    raise InputError("secure is set, but the algorithm is not private: it adds no noise that could be secure.")
