"""Addresses of machines: what only this one reaches, and what a client is counted by."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether an address or name can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_key(host: str) -> str:
    """Return the key that counts a client: the address, or of IPv6 its /64, which one client may own."""
    try:
        address = ipaddress.ip_address(plain_address(host))
    except ValueError:
        return host[:64]
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def plain_address(host: str) -> str:
    """An IPv4 address as IPv4, though a socket for both families shows it as IPv6; a zone is left out."""
    bare = host.partition("%")[0]
    return bare.removeprefix("::ffff:") if bare.startswith("::ffff:") and "." in bare else bare
