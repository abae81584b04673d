"""File names on their way between bytes, the wire, and text people see."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkyard.guest.names import from_wire, to_wire


@given(st.binary(min_size=1, max_size=60))
def test_every_name_survives_the_round_trip_through_json_and_utf_8(name: bytes) -> None:
    on_the_wire = json.loads(json.dumps(os.fsdecode(name)))
    shown = from_wire(on_the_wire)
    seen = shown.encode("utf-8").decode("utf-8")
    assert os.fsencode(to_wire(seen)) == name


def test_a_name_in_utf_8_is_shown_as_it_is() -> None:
    assert from_wire("naïve/日本.txt") == to_wire("naïve/日本.txt") == "naïve/日本.txt"


def test_names_with_surrogateescape_are_accepted_too() -> None:
    assert to_wire("caf\udce9") == "caf\udce9" == to_wire("caf\uf7e9")


@pytest.mark.parametrize("name", ["\ud800", "x\udfff"])
def test_other_surrogates_are_no_name(name: str) -> None:
    with pytest.raises(UnicodeEncodeError):
        to_wire(name)
