"""Round numbers on an axis."""

from __future__ import annotations

import math


def linear(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, within the range."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= 0.7 * rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def logarithmic(low: float, high: float) -> list[float]:
    """Powers of ten; with 2 and 5 between them over two decades or less; linear ones where fewer than three would be left."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    between = (1,) if last - first > 3 else (1, 2, 5)
    ticks = [m * 10.0**k for k in range(first, last + 1) for m in between]
    inside = [t for t in ticks if low * 0.999 <= t <= high * 1.001]
    return inside if len(inside) >= 3 else [t for t in linear(low, high) if t > 0]


def label(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{'' if mantissa == '1' else mantissa + '·'}10{str(int(exponent)).translate(_RAISED)}"
    return f"{value:.6g}"


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
