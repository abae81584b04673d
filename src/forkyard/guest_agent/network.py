"""The guest's network card: the same addresses in every sandbox, set once when the agent starts.

Everything it sends ends at the host's end of the cable, which decides. Without a program of the image: any root disk can
have an agent. A machine that is restored keeps all this, for it comes back to the same addresses.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from .loop import Loop, log

MAC = "02:fd:00:00:00:02"
ADDRESS, NETMASK, GATEWAY = "10.177.0.2", "255.255.255.252", "10.177.0.1"
_RETRY_S = 0.05
#: After so many the card may still come, but nobody waits for it any more.
_EAGER_TRIES = 1200
_PATIENT_S = 2.0

_SIOCADDRT, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x890B, 0x8916, 0x891C, 0x8913, 0x8914
_IFF_UP = 1
_RTF_UP, _RTF_GATEWAY = 1, 2


class Network:
    """Set up as soon as the card is found: udev may load its driver after the agent has started, and touch it meanwhile."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._tries = 0
        self._said = ""

    def set_up(self) -> None:
        name = _card()
        problem = "there is no network card"
        if name is not None:
            try:
                _configure(name)
                return
            except OSError as error:
                problem = str(error)
        self._tries += 1
        eager = self._tries < _EAGER_TRIES
        if problem != self._said and (name is not None or not eager):
            self._said = problem
            log(f"network: {problem}")
        self._loop.later(_RETRY_S if eager else _PATIENT_S, self.set_up)


def _card() -> str | None:
    for name in os.listdir("/sys/class/net"):
        try:
            with open(f"/sys/class/net/{name}/address") as file:
                if file.read().strip() == MAC:
                    return name
        except OSError:
            pass
    return None


def _configure(name: str) -> None:
    # The door speaks IPv4. An address nobody answers would only make programs wait.
    _set(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6", "1")
    # The host reaches servers that listen on 127.0.0.1 through the card.
    _set(f"/proc/sys/net/ipv4/conf/{name}/route_localnet", "1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _up(control, "lo")
        fcntl.ioctl(control, _SIOCSIFADDR, _request(name, _address(ADDRESS)))
        fcntl.ioctl(control, _SIOCSIFNETMASK, _request(name, _address(NETMASK)))
        _up(control, name)
        try:
            anywhere = _address("0.0.0.0")
            route = struct.pack(
                "@L16s16s16sHhLPhPLLH",
                *(0, anywhere, _address(GATEWAY), anywhere, _RTF_UP | _RTF_GATEWAY, 0, 0, 0, 0, 0, 0, 0, 0),
            )
            fcntl.ioctl(control, _SIOCADDRT, route)
        except FileExistsError:
            pass  # an agent before this one
    _replace("/etc/resolv.conf", f"nameserver {GATEWAY}\n")
    _localhost_is_ipv4()


def _up(control: socket.socket, name: str) -> None:
    answer = fcntl.ioctl(control, _SIOCGIFFLAGS, _request(name, bytes(16)))
    (flags,) = struct.unpack_from("H", answer, 16)
    fcntl.ioctl(control, _SIOCSIFFLAGS, _request(name, struct.pack("H14x", flags | _IFF_UP)))


def _request(name: str, value: bytes) -> bytes:
    return struct.pack("16s16s8x", name.encode(), value)


def _address(address: str) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def _localhost_is_ipv4() -> None:
    """A server told to listen on `localhost` must be reachable from outside, which ::1 is not."""
    try:
        with open("/etc/hosts") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    changed = [
        " ".join(word for word in line.split() if word != "localhost") if line.split()[:1] == ["::1"] else line
        for line in lines
    ]
    if changed != lines:
        _replace("/etc/hosts", "\n".join(line for line in changed if line != "::1") + "\n")


def _set(path: str, value: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(value)
    except OSError as error:
        log(f"{path}: {error}")


def _replace(path: str, text: str) -> None:
    """By a file, also where a link leads to a program's own: nobody else may change it."""
    try:
        if os.path.islink(path):
            os.unlink(path)
        with open(path, "w") as file:
            file.write(text)
    except OSError as error:
        log(f"{path}: {error}")
