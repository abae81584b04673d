"""Dev servers; reviews of pull requests that a remote tells of."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.add_column("git_remotes", sa.Column("review", sa.JSON))
    op.create_table(
        "dev_servers",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("repo_id", sa.String(32)),
        sa.Column("repo_url", sa.Text, nullable=False),
        sa.Column("branch", sa.String(256), nullable=False),
        sa.Column("sandbox_id", sa.String(32)),
        sa.Column("trigger_id", sa.String(32)),
        sa.Column("setup", sa.JSON, nullable=False),
        sa.Column("sha", sa.String(64), nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("updated_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_dev_servers"),
        sa.UniqueConstraint("name", name="uq_dev_servers_name"),
    )


def downgrade() -> None:
    op.drop_table("dev_servers")
    op.drop_column("git_remotes", "review")
