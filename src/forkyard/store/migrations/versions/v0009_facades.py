"""What a ttl does, and notes of programs on a sandbox."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sandboxes", sa.Column("on_ttl", sa.String(16)))
    op.add_column("sandboxes", sa.Column("annotations", sa.JSON))


def downgrade() -> None:
    op.drop_column("sandboxes", "annotations")
    op.drop_column("sandboxes", "on_ttl")
