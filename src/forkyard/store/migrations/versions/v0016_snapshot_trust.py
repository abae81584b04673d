"""Whether the guest in a snapshot trusts our certificate authority."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("snapshots", sa.Column("trusts_ca", sa.Boolean))


def downgrade() -> None:
    op.drop_column("snapshots", "trusts_ca")
