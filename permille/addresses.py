"""Addresses: tell loopback and public ones from others, and group the addresses of one client."""

import ipaddress
from typing import Final

# Our own list, because that of Python depends on its version. Sources: IANA's special-purpose registries, and
# the address of Azure's metadata service, which looks public.
_NOT_PUBLIC_4: Final = tuple(
    map(
        ipaddress.IPv4Network,
        [
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "168.63.129.16/32",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",
            "240.0.0.0/4",
        ],
    )
)
# Of IPv6, only this part is public. Outside of it are NAT64, site-local and unique local addresses.
_PUBLIC_6: Final = ipaddress.IPv6Network("2000::/3")
# Protocols such as Teredo, examples, and 6to4, which contains an IPv4 address.
_NOT_PUBLIC_6: Final = tuple(
    map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
)


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


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to the Internet, and to no private or special network.

    >>> is_public("93.184.215.14"), is_public("10.0.0.7"), is_public("64:ff9b::a00:7")
    (True, False, False)

    Raises:
        ValueError: it is no IP address.
    """
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            return found in _PUBLIC_6 and not any(found in network for network in _NOT_PUBLIC_6)
        # It reaches the host of the IPv4 address that it contains.
        found = found.ipv4_mapped
    return not any(found in network for network in _NOT_PUBLIC_4)


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
