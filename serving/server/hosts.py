"""Hosts: the names by which clients may call a server, and the addresses of the clients."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_HEADER = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(:[0-9]*)?")
_EVERY_ADDRESS = ("0.0.0.0/0", "::/0")


def address_of(text: str) -> Address | None:
    """The IP address that ``text`` is, an IPv4 one where it is mapped into IPv6; None for any other text."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def client_of(text: str) -> str:
    """A name for the client with address ``text``: one IPv6 client may own all addresses of a /64."""
    found = address_of(text)
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
    return text[:100] if found is None else str(found)


def network_of(text: str) -> Network:
    """The network, or the single address, that ``text`` is. Raises ValueError for any other text."""
    return ipaddress.ip_network(text.removeprefix("[").removesuffix("]"), strict=False)


def is_loopback(host: str) -> bool:
    """Whether a server on ``host`` can be reached from its own machine alone."""
    found = address_of(host)
    return host == "localhost" if found is None else found.is_loopback


def own_hosts(host: str) -> tuple[str, ...]:
    """The Hosts by which clients call a server that listens on ``host``.

    A web page can make its own name mean this machine, but not an address: on a server that other machines reach, every
    address is among these Hosts.
    """
    names = [host.partition("%")[0]]  # an address may carry the name of an interface
    own = ["localhost", "127.0.0.1", "::1"]
    if not is_loopback(host):
        own += _EVERY_ADDRESS
        names += [socket.gethostname(), socket.getfqdn()]
    known = [each for each in names if address_of(each) or _NAME.fullmatch(each.lower())]
    return tuple(dict.fromkeys([*own, *known]))


class Hosts:
    """A set of Hosts, given as names, addresses, networks of addresses, or "*" for all.

    Raises ValueError for an entry that is none of these.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._names: set[str] = set()
        self._networks: list[Network] = []
        for entry in entries:
            with contextlib.suppress(ValueError):
                self._networks.append(network_of(entry))
                continue
            name = entry.lower().removesuffix(".")
            if name != "*" and not _NAME.fullmatch(name):
                raise ValueError(
                    f"{entry[:100]!a}: expected a name without scheme and port, an address, a network such as "
                    "10.0.0.0/8, or * for any"
                )
            self._names.add(name)

    def allow(self, header: str) -> bool:
        """Whether the value of a ``Host`` header, with a port or without, names one of these hosts."""
        if "*" in self._names:
            return True
        found = _HEADER.fullmatch(header.strip())
        if found is None:
            return False
        name = found[1].removeprefix("[").removesuffix("]")
        address = address_of(name)
        if address is None:
            return name.lower().removesuffix(".") in self._names
        return any(address in network for network in self._networks)
