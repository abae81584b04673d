"""Forks, sleep, persistence, owners; snapshots."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    for column in (
        sa.Column("key_id", sa.String(32)),
        sa.Column("parent_id", sa.String(32)),
        sa.Column("snapshot_id", sa.String(32)),
        sa.Column("persistence", sa.String(16)),
        sa.Column("priority", sa.Integer),
        sa.Column("idle_timeout_s", sa.Float),
        sa.Column("ttl_s", sa.Float),
        sa.Column("checkpoint_every_s", sa.Float),
        sa.Column("checkpoints_kept", sa.Integer),
        sa.Column("expires_at", _TIME),
        sa.Column("last_active_at", _TIME),
    ):
        op.add_column("sandboxes", column)
    op.create_index("ix_sandboxes_key_id_created_at", "sandboxes", ["key_id", "created_at"])
    op.create_table(
        "snapshots",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.Text),
        sa.Column("sandbox_id", sa.String(32), nullable=False),
        sa.Column("automatic", sa.Boolean, nullable=False),
        sa.Column("ready", sa.Boolean, nullable=False),
        sa.Column("vcpus", sa.Integer, nullable=False),
        sa.Column("memory_mib", sa.Integer, nullable=False),
        sa.Column("disk_gib", sa.Integer, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("paused_ms", sa.Float, nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_snapshots"),
        sa.UniqueConstraint("name", name="uq_snapshots_name"),
        sa.ForeignKeyConstraint(["sandbox_id"], ["sandboxes.id"], name="fk_snapshots_sandbox_id"),
    )
    op.create_index("ix_snapshots_created_at_id", "snapshots", ["created_at", "id"])
    op.create_index("ix_snapshots_sandbox_id", "snapshots", ["sandbox_id"])


def downgrade() -> None:
    op.drop_table("snapshots")
    op.drop_index("ix_sandboxes_key_id_created_at", "sandboxes")
    for name in (
        "last_active_at",
        "expires_at",
        "checkpoints_kept",
        "checkpoint_every_s",
        "ttl_s",
        "idle_timeout_s",
        "priority",
        "persistence",
        "snapshot_id",
        "parent_id",
        "key_id",
    ):
        op.drop_column("sandboxes", name)
