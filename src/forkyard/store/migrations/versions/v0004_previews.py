"""Previews: tokens, links that were used, domains."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "preview_tokens",
        sa.Column("sandbox_id", sa.String(32), nullable=False),
        sa.Column("port", sa.Integer, nullable=False),
        sa.Column("token", sa.String(64), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("sandbox_id", "port", name="pk_preview_tokens"),
        sa.ForeignKeyConstraint(["sandbox_id"], ["sandboxes.id"], name="fk_preview_tokens_sandbox_id"),
    )
    op.create_table(
        "preview_links",
        sa.Column("nonce", sa.String(32), nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("nonce", name="pk_preview_links"),
    )
    op.create_index("ix_preview_links_expires_at", "preview_links", ["expires_at"])
    op.create_table(
        "domains",
        sa.Column("domain", sa.String(253), nullable=False),
        sa.Column("sandbox_id", sa.String(32), nullable=False),
        sa.Column("port", sa.Integer, nullable=False),
        sa.Column("token", sa.String(64), nullable=False),
        sa.Column("verified_at", _TIME),
        sa.Column("created_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("domain", name="pk_domains"),
        sa.ForeignKeyConstraint(["sandbox_id"], ["sandboxes.id"], name="fk_domains_sandbox_id"),
    )
    op.create_index("ix_domains_sandbox_id", "domains", ["sandbox_id"])


def downgrade() -> None:
    op.drop_table("domains")
    op.drop_table("preview_links")
    op.drop_table("preview_tokens")
