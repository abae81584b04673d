"""Triggers of repositories, their deliveries, and remotes that repositories are kept in step with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "git_triggers",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("repo_id", sa.String(32), nullable=False),
        sa.Column("events", sa.JSON, nullable=False),
        sa.Column("branches", sa.JSON, nullable=False),
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("paths", sa.JSON, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("updated_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_git_triggers"),
        sa.ForeignKeyConstraint(["repo_id"], ["repos.id"], name="fk_git_triggers_repo_id", ondelete="CASCADE"),
    )
    op.create_index("ix_git_triggers_repo_id", "git_triggers", ["repo_id"])
    op.create_table(
        "git_seen_refs",
        sa.Column("repo_id", sa.String(32), nullable=False),
        sa.Column("ref", sa.String(512), nullable=False),
        sa.Column("sha", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("repo_id", "ref", name="pk_git_seen_refs"),
        sa.ForeignKeyConstraint(["repo_id"], ["repos.id"], name="fk_git_seen_refs_repo_id", ondelete="CASCADE"),
    )
    op.create_table(
        "git_deliveries",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("trigger_id", sa.String(32), nullable=False),
        sa.Column("event", sa.String(32), nullable=False),
        sa.Column("ref", sa.Text, nullable=False),
        sa.Column("before", sa.String(64), nullable=False),
        sa.Column("after", sa.String(64), nullable=False),
        sa.Column("payload", sa.JSON, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("attempts", sa.JSON, nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("next_at", _TIME),
        sa.Column("finished_at", _TIME),
        sa.PrimaryKeyConstraint("id", name="pk_git_deliveries"),
        sa.ForeignKeyConstraint(
            ["trigger_id"], ["git_triggers.id"], name="fk_git_deliveries_trigger_id", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_git_deliveries_status_next_at", "git_deliveries", ["status", "next_at"])
    op.create_index("ix_git_deliveries_trigger_id_created_at", "git_deliveries", ["trigger_id", "created_at"])
    op.create_table(
        "git_remotes",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("repo_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("direction", sa.String(8), nullable=False),
        sa.Column("branches", sa.JSON, nullable=False),
        sa.Column("tags", sa.Boolean, nullable=False),
        sa.Column("username", sa.Text, nullable=False),
        sa.Column("secret", sa.Text),
        sa.Column("github_app", sa.JSON),
        sa.Column("poll_s", sa.Float),
        sa.Column("hook_secret", sa.Text, nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("synced_at", _TIME),
        sa.Column("error", sa.Text),
        sa.PrimaryKeyConstraint("id", name="pk_git_remotes"),
        sa.UniqueConstraint("repo_id", "name", name="uq_git_remotes_repo_id_name"),
        sa.ForeignKeyConstraint(["repo_id"], ["repos.id"], name="fk_git_remotes_repo_id", ondelete="CASCADE"),
    )
    op.create_table(
        "git_remote_refs",
        sa.Column("remote_id", sa.String(32), nullable=False),
        sa.Column("ref", sa.String(512), nullable=False),
        sa.Column("agreed_sha", sa.String(64)),
        sa.Column("local_sha", sa.String(64)),
        sa.Column("remote_sha", sa.String(64)),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("detail", sa.Text),
        sa.PrimaryKeyConstraint("remote_id", "ref", name="pk_git_remote_refs"),
        sa.ForeignKeyConstraint(
            ["remote_id"], ["git_remotes.id"], name="fk_git_remote_refs_remote_id", ondelete="CASCADE"
        ),
    )


def downgrade() -> None:
    op.drop_table("git_remote_refs")
    op.drop_table("git_remotes")
    op.drop_table("git_deliveries")
    op.drop_table("git_seen_refs")
    op.drop_table("git_triggers")
