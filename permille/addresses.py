"""Addresses of machines: what only this one reaches."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether an address or name can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
