"""SSH keys and passwords."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "ssh_keys",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("last_used_at", _TIME),
        sa.PrimaryKeyConstraint("id", name="pk_ssh_keys"),
        sa.UniqueConstraint("fingerprint", name="uq_ssh_keys_fingerprint"),
        sa.ForeignKeyConstraint(["key_id"], ["keys.id"], name="fk_ssh_keys_key_id", ondelete="CASCADE"),
    )
    op.create_index("ix_ssh_keys_key_id", "ssh_keys", ["key_id"])
    op.create_table(
        "ssh_passwords",
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("sandbox_id", sa.String(32), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_ssh_passwords"),
        sa.ForeignKeyConstraint(["sandbox_id"], ["sandboxes.id"], name="fk_ssh_passwords_sandbox_id"),
        sa.ForeignKeyConstraint(["key_id"], ["keys.id"], name="fk_ssh_passwords_key_id", ondelete="CASCADE"),
    )
    op.create_index("ix_ssh_passwords_sandbox_id", "ssh_passwords", ["sandbox_id"])
    op.create_index("ix_ssh_passwords_key_id", "ssh_passwords", ["key_id"])
    op.create_index("ix_ssh_passwords_expires_at", "ssh_passwords", ["expires_at"])


def downgrade() -> None:
    op.drop_table("ssh_passwords")
    op.drop_table("ssh_keys")
