"""The list of attacks in SECURITY.md names tests that exist, and names them all."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_attack_names_a_test_and_every_test_is_named() -> None:
    text = (ROOT / "SECURITY.md").read_text().partition("## Ways around the egress policy")[2].partition("\n## ")[0]
    rows = [row for row in text.splitlines() if row.startswith("| ") and not row.startswith("| attack |")]
    assert len(rows) > 20
    named = [re.search(r"\| `([a-z0-9_]+)` \|$", row) for row in rows]
    assert all(named), [row for row, found in zip(rows, named, strict=True) if not found]
    tests = set(re.findall(r"^def test_(\w+)", (ROOT / "tests/vm/test_attacks.py").read_text(), re.MULTILINE))
    assert {found[1] for found in named if found} == tests
