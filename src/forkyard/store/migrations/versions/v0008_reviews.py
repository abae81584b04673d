"""Identities of sandboxes, and reviews."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.add_column("sandboxes", sa.Column("identity_id", sa.String(32)))
    op.create_table(
        "reviews",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("key", sa.String(300), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("repo_id", sa.String(32)),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("target", sa.JSON, nullable=False),
        sa.Column("asked_by", sa.JSON, nullable=False),
        sa.Column("dossier", sa.JSON(none_as_null=True)),
        sa.Column("verdict", sa.JSON(none_as_null=True)),
        sa.Column("posted", sa.JSON(none_as_null=True)),
        sa.Column("error", sa.Text),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("ended_at", _TIME),
        sa.PrimaryKeyConstraint("id", name="pk_reviews"),
        sa.UniqueConstraint("key", name="uq_reviews_key"),
        sa.ForeignKeyConstraint(["repo_id"], ["repos.id"], name="fk_reviews_repo_id", ondelete="CASCADE"),
    )
    op.create_index("ix_reviews_repo_id_created_at", "reviews", ["repo_id", "created_at"])
    op.create_index("ix_reviews_created_at_id", "reviews", ["created_at", "id"])


def downgrade() -> None:
    op.drop_table("reviews")
    op.drop_column("sandboxes", "identity_id")
