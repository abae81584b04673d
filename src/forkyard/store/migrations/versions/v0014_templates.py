"""Templates: names and tags of what was built. Secrets have a version and metadata."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.add_column("secrets", sa.Column("version", sa.Integer, nullable=False, server_default="1"))
    op.add_column("secrets", sa.Column("metadata", sa.JSON, nullable=False, server_default="{}"))
    op.create_table(
        "templates",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("public", sa.Boolean, nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("updated_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_templates"),
        sa.UniqueConstraint("name", name="uq_templates_name"),
    )
    op.create_table(
        "template_builds",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("template_id", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("size", sa.JSON, nullable=False),
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("recipe", sa.JSON),
        sa.Column("build_id", sa.String(32)),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("finished_at", _TIME),
        sa.PrimaryKeyConstraint("id", name="pk_template_builds"),
        sa.ForeignKeyConstraint(
            ["template_id"], ["templates.id"], name="fk_template_builds_template_id", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_template_builds_template_id_created_at", "template_builds", ["template_id", "created_at"])
    op.create_table(
        "template_tags",
        sa.Column("template_id", sa.String(32), nullable=False),
        sa.Column("tag", sa.String(128), nullable=False),
        sa.Column("build_id", sa.String(36), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("template_id", "tag", name="pk_template_tags"),
        sa.ForeignKeyConstraint(
            ["template_id"], ["templates.id"], name="fk_template_tags_template_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["build_id"], ["template_builds.id"], name="fk_template_tags_build_id", ondelete="CASCADE"
        ),
    )
    op.create_table(
        "template_files",
        sa.Column("hash", sa.String(128), nullable=False),
        sa.Column("upload", sa.String(80), nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_template_files"),
    )


def downgrade() -> None:
    for table in ("template_files", "template_tags", "template_builds", "templates"):
        op.drop_table(table)
    op.drop_column("secrets", "metadata")
    op.drop_column("secrets", "version")
