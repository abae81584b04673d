"""The probe of KVM, with scripts in QEMU's place: it must believe nothing but a guest that ran."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkyard.vmm.qemu import probe
from forkyard.vmm.qemu.native import Native, ensure_native

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the launcher starts as root")

RUNS = "echo 'forkyard: probe guest ran'"
HANGS = "exec sleep 60"
ABORTS = "echo 'qemu-system-x86_64: error: failed to set MSR 0x10a to 0x69' >&2; kill -ABRT $$"


@pytest.fixture
def cache() -> Iterator[Path]:
    """A directory that the probe's unprivileged user can pass through."""
    with tempfile.TemporaryDirectory(prefix="fyp-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture
def native(cache: Path) -> Native:
    return ensure_native(cache)


@pytest.fixture(autouse=True)
def kvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "KVM", Path("/dev/null"))


def try_it(cache: Path, native: Native, script: str, version: str = "7.2") -> probe.Verdict:
    binary, kernel = cache / "qemu", cache / "vmlinuz"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    kernel.write_text("kernel")
    return asyncio.run(probe.probe_kvm(str(binary), version, native, kernel, cache, deadline_s=0.5))


def test_a_guest_that_ran_is_proof(cache: Path, native: Native) -> None:
    assert try_it(cache, native, RUNS).usable


def test_a_guest_that_hangs_is_given_up(cache: Path, native: Native) -> None:
    verdict = try_it(cache, native, HANGS)
    assert not verdict.usable
    assert "did not start within" in verdict.reason


def test_a_qemu_that_aborts_is_quoted(cache: Path, native: Native) -> None:
    verdict = try_it(cache, native, ABORTS)
    assert not verdict.usable
    assert "was ended by SIGABRT" in verdict.reason
    assert "failed to set MSR 0x10a" in verdict.reason


def test_a_guest_that_says_nothing_is_no_proof(cache: Path, native: Native) -> None:
    assert not try_it(cache, native, "exit 0").usable


def test_the_answer_is_kept_until_something_changes(cache: Path, native: Native) -> None:
    assert try_it(cache, native, RUNS).usable
    assert try_it(cache, native, ABORTS).usable
    assert not try_it(cache, native, ABORTS, version="8.0").usable


def test_no_device_needs_no_probe(cache: Path, native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "KVM", cache / "no-such-device")
    verdict = try_it(cache, native, RUNS)
    assert not verdict.usable
    assert "has no /dev/kvm" in verdict.reason
