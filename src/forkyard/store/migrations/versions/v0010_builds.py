"""Builds and the layers they make."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "layers",
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("snapshot_id", sa.String(32), nullable=False),
        sa.Column("parent_key", sa.String(64)),
        sa.Column("inputs", sa.JSON, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("used_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_layers"),
    )
    op.create_index("ix_layers_used_at", "layers", ["used_at"])
    op.create_table(
        "builds",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("layers", sa.JSON, nullable=False),
        sa.Column("snapshot_id", sa.String(32)),
        sa.Column("failure", sa.JSON),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("finished_at", _TIME),
        sa.PrimaryKeyConstraint("id", name="pk_builds"),
    )
    op.create_index("ix_builds_created_at_id", "builds", ["created_at", "id"])
    op.create_index("ix_builds_state", "builds", ["state"])


def downgrade() -> None:
    op.drop_table("builds")
    op.drop_table("layers")
