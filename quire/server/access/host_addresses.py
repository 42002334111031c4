from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

_LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
"""Suffixes of names that do not exist in the public DNS."""
_PRIVATE_NETWORKS = [
    *map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16")),
    *map(ip_network, ("fc00::/7", "fe80::/10")),
]
_HOST_HEADER = re.compile(r"(?:\[(?P<bracketed>[^\]]*)\]|(?P<name>[^\s:\[\]/\\?#@%,]*))(?::[0-9]*)?")


def normalize_host(host: str) -> str | None:
    host = host.strip().lower()
    match = _HOST_HEADER.fullmatch(host)
    if match is None:
        return _normalize_address(host)  # IPv6 without brackets
    if match["bracketed"] is not None:
        return _normalize_address(match["bracketed"])
    return _normalize_address(match["name"]) or match["name"].removesuffix(".")


def _normalize_address(text: str) -> str | None:
    try:
        return str(ip_address(text))
    except ValueError:
        return None


def is_local_or_private_host(host: str) -> bool:
    name = normalize_host(host)
    if name is None:
        return False
    try:
        return _is_local_or_private_address(ip_address(name.partition("%")[0]))
    except ValueError:
        pass
    return name in ("", "localhost") or name.endswith(_LOCAL_SUFFIXES) or name == socket.gethostname().lower()


def _is_local_or_private_address(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback or address.is_unspecified or any(address in network for network in _PRIVATE_NETWORKS):
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))  # works only for this machine's addresses
    except OSError:
        return False
    return True


def is_loopback_listener(listener: socket.socket) -> bool:
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    address = ip_address(str(listener.getsockname()[0]).partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def matches_any_host_pattern(name: str, patterns: Iterable[str]) -> bool:
    """*.example.com matches all names below example.com; * matches any."""
    return any(
        pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]) and name != pattern[1:])
        for pattern in patterns
    )
