"""Addresses of clients: tell loopback from others, and group the addresses of one client."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether an address or name can only be reached from this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("192.0.2.1")
    (True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_key(host: str) -> str:
    """Return the key under which a client is counted: its IPv4 address, or the /64 of its IPv6 address.

    A provider usually gives a customer a whole /64, so all its addresses count as one client:

        >>> address_key("2001:db8::1") == address_key("2001:db8::2")
        True
    """
    try:
        address = ipaddress.ip_address(plain_address(host))
    except ValueError:
        # The client of a Unix socket, for example, has no address. Keep the key short.
        return host[:64]
    if address.version == 4:
        return str(address)
    # Clear the lower half, which identifies the interface.
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def plain_address(host: str) -> str:
    """Return an address without its zone, and an IPv4 address in IPv4 form.

    A socket for both families shows IPv4 clients as `::ffff:192.0.2.1`:

        >>> plain_address("::ffff:192.0.2.1")
        '192.0.2.1'
    """
    bare = host.partition("%")[0]
    return bare.removeprefix("::ffff:") if bare.startswith("::ffff:") and "." in bare else bare
