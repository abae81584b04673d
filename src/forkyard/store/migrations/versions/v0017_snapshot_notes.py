"""What programs noted of a sandbox, kept with its snapshots."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("snapshots", sa.Column("annotations", sa.JSON))


def downgrade() -> None:
    op.drop_column("snapshots", "annotations")
