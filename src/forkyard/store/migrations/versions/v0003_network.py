"""Network: policies, secrets, what left."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)
_COLUMNS = (
    ("network", sa.JSON),
    ("secrets", sa.JSON),
    ("trusts_ca", sa.Boolean),
    ("activity_threshold_bytes", sa.Integer),
    ("bytes_out", sa.BigInteger),
    ("bytes_in", sa.BigInteger),
    ("connections", sa.BigInteger),
    ("denied", sa.BigInteger),
)


def upgrade() -> None:
    for name, kind in _COLUMNS:
        op.add_column("sandboxes", sa.Column(name, kind))
    op.create_table(
        "egress",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("sandbox_id", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("exec_id", sa.String(64)),
        sa.Column("process", sa.Text),
        sa.Column("trace_id", sa.Text),
        sa.Column("name", sa.Text),
        sa.Column("address", sa.String(64)),
        sa.Column("port", sa.Integer),
        sa.Column("bytes_out", sa.BigInteger, nullable=False),
        sa.Column("bytes_in", sa.BigInteger, nullable=False),
        sa.Column("duration_ms", sa.Float, nullable=False),
        sa.Column("verdict", sa.String(8), nullable=False),
        sa.Column("reason", sa.Text),
        sa.PrimaryKeyConstraint("id", name="pk_egress"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_egress_sandbox_id_id", "egress", ["sandbox_id", "id"])
    op.create_table(
        "secrets",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("sealed", sa.Text, nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("updated_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_secrets"),
    )


def downgrade() -> None:
    op.drop_table("secrets")
    op.drop_index("ix_egress_sandbox_id_id", "egress")
    op.drop_table("egress")
    for name, _ in reversed(_COLUMNS):
        op.drop_column("sandboxes", name)
