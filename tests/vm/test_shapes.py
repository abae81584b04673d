"""Machines of every size."""

import pytest

from forkyard import Forkyard
from forkyard.errors import ForkyardError, InvalidRequest

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("vcpus", "memory_mib", "disk_gib"),
    [(1, 128, 4), (2, 1024, 10), (8, 16384, 8)],
    ids=["smallest", "usual", "largest"],
)
def test_a_machine_has_the_shape_that_was_asked_for(fy: Forkyard, vcpus: int, memory_mib: int, disk_gib: int) -> None:
    with fy.sandboxes.create(vcpus=vcpus, memory_mib=memory_mib, disk_gib=disk_gib, timeout_s=600) as sbx:
        assert sbx.exec("nproc").stdout.strip() == str(vcpus)
        total_mib = int(sbx.exec("free -m | awk '/Mem:/ {print $2}'").stdout)
        assert memory_mib * 0.75 - 60 < total_mib <= memory_mib
        size_gib = int(sbx.exec("df --output=size -BM / | tail -1 | tr -dc 0-9").stdout) / 1024
        assert disk_gib * 0.9 < size_gib <= disk_gib
        assert sbx.info.shape.memory_mib == memory_mib


@pytest.mark.parametrize(
    "shape", [{"vcpus": 0}, {"vcpus": 9}, {"memory_mib": 64}, {"memory_mib": 10**9}, {"disk_gib": 1}, {"vcpus": "many"}]
)
def test_impossible_shapes_are_refused_by_name(fy: Forkyard, shape: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        fy.sandboxes.create(**shape)
    assert next(iter(shape)) in refused.value.message
    assert isinstance(refused.value, ForkyardError)


def test_milestones_of_boot_and_create_can_be_read(fy: Forkyard) -> None:
    with fy.sandboxes.create() as sbx:
        logs = sbx.logs()
        boot = [m.name for m in logs.template_boot]
        for name in ("kernel", "root-mounted", "sshd", "agent", "systemd-running"):
            assert name in boot
        assert [m.name for m in logs.create] == ["restored", "ready"]
