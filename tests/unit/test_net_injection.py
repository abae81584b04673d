"""Where secrets go, and where they do not."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkyard.net.base import Injection
from forkyard.net.injection import Scrubber, inject, wanted

PLACEHOLDER = "forkyard-secret-0123"
VALUE = "s3cr3t-value"


def injection(**changes: object) -> Injection:
    fields: dict[str, object] = {
        "placeholder": PLACEHOLDER,
        "value": VALUE,
        "hosts": ("api.example.test", "*.git.test"),
        "header": "Authorization",
        "format": "Bearer {}",
    }
    return Injection(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "goes"),
    [
        ("api.example.test", True),
        ("a.git.test", True),
        ("git.test", False),
        ("xapi.example.test", False),
        ("api.example.test.evil.test", False),
    ],
)
def test_it_goes_to_its_hosts_only(name: str, goes: bool) -> None:
    assert bool(wanted([injection()], name)) is goes


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        (PLACEHOLDER, f"Bearer {VALUE}"),
        (f"token {PLACEHOLDER}", f"token {VALUE}"),
        (f"Bearer {PLACEHOLDER}", f"Bearer {VALUE}"),
        ("Bearer something else", "Bearer something else"),
        ("Basic !!!", "Basic !!!"),
        (
            "Basic " + base64.b64encode(f"x-access-token:{PLACEHOLDER}".encode()).decode(),
            "Basic " + base64.b64encode(f"x-access-token:{VALUE}".encode()).decode(),
        ),
    ],
)
def test_the_placeholder_becomes_the_value(sent: str, arrives: str) -> None:
    headers, _ = inject([(b"authorization", sent.encode())], [injection()])
    assert headers == [(b"authorization", arrives.encode())]


def test_a_format_with_basic_encodes_the_value() -> None:
    encoded = base64.b64encode(VALUE.encode())
    headers, used = inject([(b"Authorization", PLACEHOLDER.encode())], [injection(format="Basic {basic}")])
    assert headers == [(b"Authorization", b"Basic " + encoded)]
    assert used >= {VALUE.encode(), encoded}


def test_other_headers_keep_the_placeholder() -> None:
    sent = [(b"X-Other", PLACEHOLDER.encode()), (b"Cookie", f"a={PLACEHOLDER}".encode())]
    assert inject(sent, [injection()]) == (sent, set())


def test_what_was_put_in_does_not_come_back() -> None:
    _, used = inject([(b"Authorization", PLACEHOLDER.encode())], [injection()])
    scrubbed = Scrubber(used).whole(f'{{"Authorization": "Bearer {VALUE}"}}'.encode())
    assert VALUE.encode() not in scrubbed
    assert len(scrubbed) == len(f'{{"Authorization": "Bearer {VALUE}"}}')


@given(st.lists(st.binary(max_size=20), max_size=8), st.lists(st.integers(1, 7), max_size=40))
def test_a_value_is_found_however_the_stream_is_cut(parts: list[bytes], cuts: list[int]) -> None:
    stream = VALUE.encode().join(parts)
    scrubber = Scrubber({VALUE.encode()})
    out, at = b"", 0
    for cut in cuts:
        out += scrubber.feed(stream[at : at + cut])
        at += cut
    out += scrubber.feed(stream[at:]) + scrubber.finish()
    assert out == stream.replace(VALUE.encode(), b"*" * len(VALUE))


def test_nothing_is_held_back_that_cannot_be_a_secret() -> None:
    scrubber = Scrubber({b"secret"})
    assert scrubber.feed(b"data: tick\n\n") == b"data: tick\n\n"
    assert scrubber.feed(b"xsec") == b"x"
    assert scrubber.feed(b"ond") == b"second"
