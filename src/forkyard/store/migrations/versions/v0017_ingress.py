"""Bytes of previews, SSH and forwarded ports."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0010"
branch_labels = None
depends_on = None

_COLUMNS = ("ingress_bytes_in", "ingress_bytes_out")


def upgrade() -> None:
    for name in _COLUMNS:
        op.add_column("sandboxes", sa.Column(name, sa.BigInteger))


def downgrade() -> None:
    for name in reversed(_COLUMNS):
        op.drop_column("sandboxes", name)
