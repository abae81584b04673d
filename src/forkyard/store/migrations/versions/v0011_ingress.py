"""Bytes of previews, SSH and forwarded ports; HTTP requests in the egress log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_COLUMNS = (
    ("sandboxes", "ingress_bytes_in", sa.BigInteger()),
    ("sandboxes", "ingress_bytes_out", sa.BigInteger()),
    ("egress", "method", sa.String(32)),
    ("egress", "path", sa.Text()),
    ("egress", "status", sa.Integer()),
)


def upgrade() -> None:
    for table, name, kind in _COLUMNS:
        op.add_column(table, sa.Column(name, kind))


def downgrade() -> None:
    for table, name, _ in reversed(_COLUMNS):
        op.drop_column(table, name)
