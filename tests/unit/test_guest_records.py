"""What a guest says of its sockets is checked like everything it says."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkyard.guest import records
from forkyard.guest.frames import Violation

_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_OWNER = st.fixed_dictionaries({}, optional=dict.fromkeys(("exec_id", "trace_id", "pid", "process"), _ANYTHING))


def test_an_owner_is_read_as_it_is_said() -> None:
    said = {"exec_id": "e1", "trace_id": None, "pid": 7, "process": "cu\x1brl"}
    owner = records.socket_owner({"owner": said})
    assert owner is not None
    assert (owner.exec_id, owner.trace_id, owner.pid, owner.process) == ("e1", None, 7, "cu?rl")
    assert records.socket_owner({"owner": None}) is None


@given(st.fixed_dictionaries({"owner": _ANYTHING | _OWNER}))
def test_whatever_is_said_of_an_owner_is_short_and_printable_or_refused(said: dict[str, Any]) -> None:
    with contextlib.suppress(Violation):
        owner = records.socket_owner(said)
        if owner is not None:
            assert len(owner.exec_id or "") <= 64
            assert len(owner.trace_id or "") <= 256
            assert (owner.process or "x").isprintable()
            json.dumps([owner.exec_id, owner.trace_id, owner.pid, owner.process]).encode()


@given(st.fixed_dictionaries({"name": _ANYTHING | st.binary(max_size=60).map(bytes.hex)}))
def test_a_connection_has_a_name_of_the_right_length_and_a_port_or_is_refused(said: dict[str, Any]) -> None:
    with contextlib.suppress(Violation):
        name, port = records.connection(said)
        assert len(bytes.fromhex(name)) == 49
        assert 0 <= port < 65536


@pytest.mark.parametrize("name", ["", "zz" * 49, "00" * 48])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(Violation):
        records.connection({"name": name})
