"""Runs and schedules; domains that are mapped to nothing yet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    with op.batch_alter_table("domains") as domains:
        domains.alter_column("sandbox_id", existing_type=sa.String(32), nullable=True)
        domains.alter_column("port", existing_type=sa.Integer, nullable=True)
    op.create_table(
        "schedules",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("name", sa.Text),
        sa.Column("cron", sa.Text, nullable=False),
        sa.Column("timezone", sa.Text, nullable=False),
        sa.Column("retries", sa.Integer, nullable=False),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("active", sa.Boolean, nullable=False),
        sa.Column("next_at", _TIME),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("updated_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_schedules"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("schedule_id", sa.String(32)),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("max_attempts", sa.Integer, nullable=False),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("outcome", sa.JSON),
        sa.Column("run_at", _TIME, nullable=False),
        sa.Column("next_at", _TIME),
        sa.Column("started_at", _TIME),
        sa.Column("finished_at", _TIME),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedules.id"], name="fk_runs_schedule_id"),
    )
    op.create_index("ix_runs_run_at", "runs", ["run_at"])
    op.create_index("ix_runs_schedule_id", "runs", ["schedule_id"])
    op.create_index("ix_runs_state", "runs", ["state"])


def downgrade() -> None:
    op.drop_table("runs")
    op.drop_table("schedules")
    op.execute("DELETE FROM domains WHERE sandbox_id IS NULL")
    with op.batch_alter_table("domains") as domains:
        domains.alter_column("sandbox_id", existing_type=sa.String(32), nullable=False)
        domains.alter_column("port", existing_type=sa.Integer, nullable=False)
