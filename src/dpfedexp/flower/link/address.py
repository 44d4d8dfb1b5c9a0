"""Where something listens."""

from __future__ import annotations

import ipaddress

from dpfedexp.errors import InputError


def parse_address(address: str, name: str) -> tuple[str, int]:
    """Host and port.

    Args:
        address: an IP address and a port, such as 0.0.0.0:9092 or [::]:9092.
        name: of the setting, for the sentence.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        ipaddress.ip_address(host)
        number = int(port)
    except ValueError:
        number = 0
    if not 1 <= number <= 65535:
        raise InputError(f"{name} is {address!r}; it must be an IP address and a port, such as 127.0.0.1:9092.")
    return host, number
