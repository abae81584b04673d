"""Git, identities, the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "repos",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("description", sa.Text),
        sa.Column("visibility", sa.String(16), nullable=False),
        sa.Column("ready", sa.Boolean, nullable=False),
        sa.Column("quota_bytes", sa.BigInteger, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("updated_at", _TIME, nullable=False),
        sa.Column("pushed_at", _TIME),
        sa.PrimaryKeyConstraint("id", name="pk_repos"),
        sa.UniqueConstraint("name", name="uq_repos_name"),
    )
    op.create_index("ix_repos_created_at_id", "repos", ["created_at", "id"])
    op.create_table(
        "lfs_locks",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("repo_id", sa.String(32), nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("owner_id", sa.String(32), nullable=False),
        sa.Column("owner_name", sa.Text, nullable=False),
        sa.Column("locked_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_lfs_locks"),
        sa.UniqueConstraint("repo_id", "path", name="uq_lfs_locks_repo_id_path"),
        sa.ForeignKeyConstraint(["repo_id"], ["repos.id"], name="fk_lfs_locks_repo_id", ondelete="CASCADE"),
    )
    op.create_table(
        "identities",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("managed", sa.Text),
        sa.Column("created_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_identities"),
        sa.UniqueConstraint("managed", name="uq_identities_managed"),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("identity_id", sa.String(32), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("name", sa.Text),
        sa.Column("sandbox_id", sa.String(32)),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("expires_at", _TIME),
        sa.Column("last_used_at", _TIME),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.UniqueConstraint("hash", name="uq_tokens_hash"),
        sa.ForeignKeyConstraint(["identity_id"], ["identities.id"], name="fk_tokens_identity_id", ondelete="CASCADE"),
    )
    op.create_index("ix_tokens_identity_id", "tokens", ["identity_id"])
    op.create_table(
        "repo_grants",
        sa.Column("identity_id", sa.String(32), nullable=False),
        sa.Column("repo_id", sa.String(32), nullable=False),
        sa.Column("permission", sa.String(16), nullable=False),
        sa.Column("granted_at", _TIME, nullable=False),
        sa.Column("granted_by", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("identity_id", "repo_id", name="pk_repo_grants"),
        sa.ForeignKeyConstraint(
            ["identity_id"], ["identities.id"], name="fk_repo_grants_identity_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["repo_id"], ["repos.id"], name="fk_repo_grants_repo_id", ondelete="CASCADE"),
    )
    op.create_index("ix_repo_grants_repo_id", "repo_grants", ["repo_id"])
    op.create_table(
        "sandbox_grants",
        sa.Column("identity_id", sa.String(32), nullable=False),
        sa.Column("sandbox_id", sa.String(32), nullable=False),
        sa.Column("allowed_users", sa.JSON),
        sa.Column("granted_at", _TIME, nullable=False),
        sa.Column("granted_by", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("identity_id", "sandbox_id", name="pk_sandbox_grants"),
        sa.ForeignKeyConstraint(
            ["identity_id"], ["identities.id"], name="fk_sandbox_grants_identity_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["sandbox_id"], ["sandboxes.id"], name="fk_sandbox_grants_sandbox_id", ondelete="CASCADE"
        ),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("actor_kind", sa.String(16), nullable=False),
        sa.Column("actor_id", sa.String(32)),
        sa.Column("actor_name", sa.Text, nullable=False),
        sa.Column("token_id", sa.String(32)),
        sa.Column("sandbox_id", sa.String(32)),
        sa.Column("address", sa.Text),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("resource", sa.Text),
        sa.Column("allowed", sa.Boolean, nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_actor_id_id", "audit", ["actor_id", "id"])


def downgrade() -> None:
    for name in ("audit", "sandbox_grants", "repo_grants", "tokens", "identities"):
        op.drop_table(name)
    op.drop_table("lfs_locks")
    op.drop_table("repos")
