"""Volumes, which of them a sandbox has, and which variables its snapshots pass on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "volumes",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("size_mib", sa.Integer, nullable=False),
        sa.Column("key_id", sa.String(32)),
        sa.Column("writer", sa.String(32)),
        sa.Column("ready", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_volumes"),
        sa.UniqueConstraint("name", name="uq_volumes_name"),
    )
    op.create_index("ix_volumes_writer", "volumes", ["writer"])
    op.add_column("sandboxes", sa.Column("volumes", sa.JSON))
    op.add_column("sandboxes", sa.Column("public_env", sa.JSON))


def downgrade() -> None:
    op.drop_column("sandboxes", "public_env")
    op.drop_column("sandboxes", "volumes")
    op.drop_table("volumes")
