"""Options that spell a network policy, secrets and credentials, for `create`, `set`, `dev up` and `egress set`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

ACCESS = ("public", "token", "off")
PRESETS = click.Choice(["coding", "research", "evaluation", "autonomous", "open", "none"])
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def size(text: str) -> int:
    """`65536`, `64K`, `10M`, `2G`."""
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in ("K", "M", "G") else (text, "")
    if not digits.isdecimal():
        raise click.BadParameter(f"{text!r} is no size. Give bytes, or 64K, 10M, 2G.")
    return int(digits) * _UNITS[unit]


def policy_options(function: F) -> F:
    for option in reversed(
        (
            click.option("--preset", type=PRESETS, help="What may leave. Default: coding."),
            click.option(
                "--allow", multiple=True, metavar="DOMAIN", help="Also this; `*.example.com` is all below it."
            ),
            click.option("--deny", multiple=True, metavar="DOMAIN", help="Never this. Goes before --allow."),
            click.option("--allow-cidr", multiple=True, metavar="CIDR", help="Also these addresses, private or not."),
            click.option("--rate", "bytes_per_s", type=size, metavar="SIZE", help="Bytes per second, such as 512K."),
            click.option("--connections", "connections_per_minute", type=int, metavar="N", help="New ones per minute."),
            click.option("--budget", "byte_budget", type=size, metavar="SIZE", help="Bytes in all, such as 2G."),
            click.option("--record", metavar="NAME", help="Store HTTP exchanges under this name."),
            click.option("--replay", metavar="NAME", help="Answer from what was recorded, and refuse the rest."),
        )
    ):
        function = option(function)
    return function


def taken_policy(options: dict[str, Any]) -> dict[str, Any] | None:
    """Takes what `policy_options` added out of the options; None if nothing was typed."""
    rules = [{"action": "deny", "domain": domain} for domain in options.pop("deny")]
    rules += [{"action": "allow", "domain": domain} for domain in options.pop("allow")]
    rules += [{"action": "allow", "cidr": cidr} for cidr in options.pop("allow_cidr")]
    names = ("preset", "bytes_per_s", "connections_per_minute", "byte_budget", "record", "replay")
    egress = {name: value for name in names if (value := options.pop(name)) is not None}
    if rules:
        egress["rules"] = rules
    return egress or None


def access_options(function: F) -> F:
    for option in (
        click.option(
            "--port-access",
            multiple=True,
            callback=_port_access,
            metavar="PORT=ACCESS",
            help="The same for one port, such as 3000=token. May be repeated.",
        ),
        click.option(
            "--access",
            type=click.Choice(ACCESS),
            help="Who may open previews: everybody who knows the address, whoever has a token (see url), nobody. "
            "Default: public; under the preset autonomous, off.",
        ),
    ):
        function = option(function)
    return function


def taken_access(options: dict[str, Any]) -> dict[str, Any] | None:
    """Takes what `access_options` added out of the options; None if nothing was typed."""
    access, ports = options.pop("access"), options.pop("port_access")
    ingress = {"access": access} if access else {}
    return {**ingress, **({"ports": ports} if ports else {})} or None


def with_access(ingress: dict[str, Any], typed: dict[str, Any]) -> dict[str, Any]:
    """Ports that were not typed stay as they are."""
    return {**ingress, **typed, "ports": {**ingress["ports"], **typed.get("ports", {})}}


def with_policy(egress: dict[str, Any], typed: dict[str, Any]) -> dict[str, Any]:
    """What was not typed stays as it is; of recording and replaying there is one at a time."""
    one_of = {"record": None, "replay": None} if {"record", "replay"} & typed.keys() else {}
    return {**egress, **one_of, **typed}


def _port_access(_ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[int, str]:
    found = {}
    for value in values:
        port, _, access = value.partition("=")
        if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535 or access not in ACCESS:
            raise click.BadParameter(f"{value!r} is not of the form PORT=public, PORT=token or PORT=off.", param=param)
        found[int(port)] = access
    return found


def secret_option(function: F) -> F:
    return click.option(
        "--secret",
        "secrets",
        multiple=True,
        callback=_secrets,
        metavar="NAME=HOST[,HOST…]",
        help="A variable whose value never enters: put in on the way to these hosts, as `Authorization: Bearer …`. Its "
        "value is the stored secret of this name (see secrets set), or else our own variable of this name.",
    )(function)


Login = tuple[str, str] | tuple[str, str, str]
_REGISTRY = "forkyard.registry"


def registry_option(function: F) -> F:
    function = click.option(
        "--registry",
        "registry_name",
        callback=_registry_name,
        is_eager=True,
        expose_value=False,
        metavar="HOST[:PORT]",
        help="The registry that --registry-user is for, if images of others are needed too.",
    )(function)
    return click.option(
        "--registry-user",
        "registry",
        callback=_registry,
        metavar="USER",
        help="For images of a private registry. The password is on standard input, or asked for; it is kept nowhere.",
    )(function)


def _registry_name(ctx: click.Context, _param: click.Parameter, name: str | None) -> None:
    ctx.meta[_REGISTRY] = name


def _registry(ctx: click.Context, _param: click.Parameter, user: str | None) -> Login | None:
    name: str | None = ctx.meta.get(_REGISTRY)
    if user is None:
        if name is not None:
            raise click.UsageError("--registry says what --registry-user is for; give that too.")
        return None
    typed = sys.stdin.isatty()
    password = str(click.prompt("Password", hide_input=True, err=True)) if typed else sys.stdin.read().rstrip("\n")
    return (user, password) if name is None else (user, password, name)


def _secrets(_ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for value in values:
        name, equals, hosts = value.partition("=")
        if not name or not equals or not hosts:
            raise click.BadParameter(f"{value!r} is not of the form NAME=HOST.", param=param)
        found[name] = {"hosts": hosts.split(",")}
    return found


def with_values(secrets: dict[str, Any], stored: set[str]) -> dict[str, Any]:
    """Those that are not stored take their value from our environment, if it is there."""
    return {
        name: {**secret, "value": os.environ[name]} if name not in stored and os.environ.get(name) else secret
        for name, secret in secrets.items()
    }
