"""A restored machine is itself and nobody else."""

import time
import uuid
from datetime import UTC, datetime

from forkyard import Forkyard


def test_two_sandboxes_of_one_template_have_different_random_numbers(fy: Forkyard) -> None:
    with fy.sandboxes.create() as one, fy.sandboxes.create() as two:
        urandom = "head -c 32 /dev/urandom | od -An -tx1"
        python = ["python3", "-c", "import uuid, random; print(uuid.uuid4(), random.random())"]
        for command in (urandom, python):
            first, second = one.exec(command).stdout, two.exec(command).stdout
            assert first.strip()
            assert first != second
        kernel = "cat /proc/sys/kernel/random/uuid"
        assert uuid.UUID(one.exec(kernel).stdout.strip()) != uuid.UUID(two.exec(kernel).stdout.strip())


def test_hostname_and_machine_id_are_its_own(fy: Forkyard) -> None:
    with fy.sandboxes.create() as one, fy.sandboxes.create() as two:
        assert one.exec("hostname").stdout.strip() == one.id
        assert two.exec("hostname").stdout.strip() == two.id
        ids = {s.exec("cat /etc/machine-id").stdout.strip() for s in (one, two)}
        assert len(ids) == 2
        assert all(len(i) == 32 for i in ids)


def test_the_clock_is_right_although_the_template_is_old(sbx) -> None:  # type: ignore[no-untyped-def]
    before = time.time()
    inside = float(sbx.exec("date +%s.%N").stdout)
    after = time.time()
    assert before - 1 <= inside <= after + 1, datetime.fromtimestamp(inside, UTC)
