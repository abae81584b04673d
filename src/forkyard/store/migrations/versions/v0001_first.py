"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "sandboxes",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.Text),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("cause", sa.String(32), nullable=False),
        sa.Column("cause_detail", sa.Text),
        sa.Column("incarnation", sa.Integer, nullable=False),
        sa.Column("vcpus", sa.Integer, nullable=False),
        sa.Column("memory_mib", sa.Integer, nullable=False),
        sa.Column("disk_gib", sa.Integer, nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("env", sa.JSON, nullable=False),
        sa.Column("template", sa.Text),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("updated_at", _TIME, nullable=False),
        sa.Column("ended_at", _TIME),
        sa.PrimaryKeyConstraint("id", name="pk_sandboxes"),
    )
    op.create_index("ix_sandboxes_created_at_id", "sandboxes", ["created_at", "id"])
    op.create_index("ix_sandboxes_state", "sandboxes", ["state"])
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("sandbox_id", sa.String(32)),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("cause", sa.String(32)),
        sa.Column("detail", sa.Text),
        sa.Column("data", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sa.ForeignKeyConstraint(["sandbox_id"], ["sandboxes.id"], name="fk_events_sandbox_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_sandbox_id_id", "events", ["sandbox_id", "id"])
    op.create_table(
        "keys",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("last_used_at", _TIME),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
        sa.UniqueConstraint("hash", name="uq_keys_hash"),
    )
    op.create_table(
        "idempotency",
        sa.Column("api_key_id", sa.String(32), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("request_hash", sa.String(64), nullable=False),
        sa.Column("sandbox_id", sa.String(32), nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("api_key_id", "key", name="pk_idempotency"),
        sa.ForeignKeyConstraint(["sandbox_id"], ["sandboxes.id"], name="fk_idempotency_sandbox_id"),
    )
    op.create_index("ix_idempotency_sandbox_id", "idempotency", ["sandbox_id"])
    op.create_index("ix_idempotency_expires_at", "idempotency", ["expires_at"])


def downgrade() -> None:
    for table in ("idempotency", "keys", "events", "sandboxes"):
        op.drop_table(table)
