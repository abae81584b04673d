"""Bytes of previews, SSH and forwarded ports; HTTP requests in the egress log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0010"
branch_labels = None
depends_on = None

_COLUMNS = {
    "sandboxes": {"ingress_bytes_in": sa.BigInteger, "ingress_bytes_out": sa.BigInteger},
    "egress": {"method": sa.String(32), "path": sa.Text, "status": sa.Integer},
}


def upgrade() -> None:
    for table, columns in _COLUMNS.items():
        for name, kind in columns.items():
            op.add_column(table, sa.Column(name, kind))


def downgrade() -> None:
    for table, columns in _COLUMNS.items():
        for name in columns:
            op.drop_column(table, name)
