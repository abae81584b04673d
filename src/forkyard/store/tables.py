"""The tables, as they are after the newest migration (a test compares the two).

Owns: names, types, indexes. Never does: queries (`sql.py`). Only types and constraints that PostgreSQL has too.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa


class UtcDateTime(sa.TypeDecorator[datetime]):
    """SQLite keeps no time zone: everything is UTC on the way in and says so on the way out."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> datetime | None:  # noqa: ARG002
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

sandboxes = sa.Table(
    "sandboxes",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.Text),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("cause", sa.String(32), nullable=False),
    sa.Column("cause_detail", sa.Text),
    sa.Column("incarnation", sa.Integer, nullable=False),
    sa.Column("vcpus", sa.Integer, nullable=False),
    sa.Column("memory_mib", sa.Integer, nullable=False),
    sa.Column("disk_gib", sa.Integer, nullable=False),
    sa.Column("labels", sa.JSON, nullable=False),
    sa.Column("env", sa.JSON, nullable=False),
    sa.Column("template", sa.Text),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("updated_at", UtcDateTime, nullable=False),
    sa.Column("ended_at", UtcDateTime),
    sa.Column("key_id", sa.String(32)),
    sa.Column("parent_id", sa.String(32)),
    sa.Column("snapshot_id", sa.String(32)),  # may be gone: what was made from it does not need it
    sa.Column("persistence", sa.String(16)),
    sa.Column("priority", sa.Integer),
    sa.Column("idle_timeout_s", sa.Float),
    sa.Column("ttl_s", sa.Float),
    sa.Column("checkpoint_every_s", sa.Float),
    sa.Column("checkpoints_kept", sa.Integer),
    sa.Column("expires_at", UtcDateTime),
    sa.Column("last_active_at", UtcDateTime),
    sa.Column("network", sa.JSON),
    sa.Column("secrets", sa.JSON),  # by name; values are encrypted, or absent: then the stored secret is meant
    sa.Column("trusts_ca", sa.Boolean),  # what its guest was last told; null: nobody knows
    sa.Column("activity_threshold_bytes", sa.Integer),
    sa.Column("bytes_out", sa.BigInteger),
    sa.Column("bytes_in", sa.BigInteger),
    sa.Column("connections", sa.BigInteger),
    sa.Column("denied", sa.BigInteger),
    sa.Column("ingress_bytes_in", sa.BigInteger),
    sa.Column("ingress_bytes_out", sa.BigInteger),
    sa.Column("identity_id", sa.String(32)),
    sa.Column("on_ttl", sa.String(16)),
    sa.Column("annotations", sa.JSON),
    sa.Column("volumes", sa.JSON),
    sa.Column("public_env", sa.JSON),
    sa.Index(None, "created_at", "id"),  # the order of lists
    sa.Index(None, "state"),
    sa.Index(None, "key_id", "created_at"),  # creates of the last minute
)

snapshots = sa.Table(
    "snapshots",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.Text, unique=True),
    sa.Column("sandbox_id", sa.String(32), sa.ForeignKey("sandboxes.id"), nullable=False),
    sa.Column("automatic", sa.Boolean, nullable=False),
    sa.Column("ready", sa.Boolean, nullable=False),  # not: being made or removed; a start of the daemon clears it away
    sa.Column("vcpus", sa.Integer, nullable=False),
    sa.Column("memory_mib", sa.Integer, nullable=False),
    sa.Column("disk_gib", sa.Integer, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("paused_ms", sa.Float, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("trusts_ca", sa.Boolean),  # its guest, at that instant; null: nobody knows
    sa.Column("annotations", sa.JSON),
    sa.Index(None, "created_at", "id"),
    sa.Index(None, "sandbox_id"),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.Column("sandbox_id", sa.String(32), sa.ForeignKey("sandboxes.id")),
    sa.Column("kind", sa.String(64), nullable=False),
    sa.Column("cause", sa.String(32)),
    sa.Column("detail", sa.Text),
    sa.Column("data", sa.JSON, nullable=False),
    sa.Index(None, "sandbox_id", "id"),
    sqlite_autoincrement=True,  # an id is never used twice: readers resume after the last one they saw
)

keys = sa.Table(
    "keys",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("hash", sa.String(64), nullable=False, unique=True),
    sa.Column("prefix", sa.String(16), nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("last_used_at", UtcDateTime),
)

idempotency = sa.Table(
    "idempotency",
    metadata,
    sa.Column("api_key_id", sa.String(32), primary_key=True),
    sa.Column("key", sa.String(255), primary_key=True),
    sa.Column("request_hash", sa.String(64), nullable=False),
    sa.Column("sandbox_id", sa.String(32), sa.ForeignKey("sandboxes.id"), nullable=False),
    sa.Column("expires_at", UtcDateTime, nullable=False),
    sa.Index(None, "sandbox_id"),
    sa.Index(None, "expires_at"),
)

egress = sa.Table(
    "egress",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.Column("sandbox_id", sa.String(32), nullable=False),
    sa.Column("kind", sa.String(8), nullable=False),
    sa.Column("exec_id", sa.String(64)),
    sa.Column("process", sa.Text),
    sa.Column("trace_id", sa.Text),
    sa.Column("name", sa.Text),
    sa.Column("address", sa.String(64)),
    sa.Column("port", sa.Integer),
    sa.Column("bytes_out", sa.BigInteger, nullable=False),
    sa.Column("bytes_in", sa.BigInteger, nullable=False),
    sa.Column("duration_ms", sa.Float, nullable=False),
    sa.Column("verdict", sa.String(8), nullable=False),
    sa.Column("reason", sa.Text),
    sa.Column("method", sa.String(32)),
    sa.Column("path", sa.Text),
    sa.Column("status", sa.Integer),
    sa.Index(None, "sandbox_id", "id"),
    sqlite_autoincrement=True,  # as with events
)

secrets = sa.Table(
    "secrets",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("sealed", sa.Text, nullable=False),  # encrypted with the key in the state directory
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("updated_at", UtcDateTime, nullable=False),
    sa.Column("version", sa.Integer, nullable=False, server_default="1"),  # how often it was set
    sa.Column("metadata", sa.JSON, nullable=False, server_default="{}"),
)

ssh_keys = sa.Table(
    "ssh_keys",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("key_id", sa.String(32), sa.ForeignKey("keys.id", ondelete="CASCADE"), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("fingerprint", sa.String(64), nullable=False, unique=True),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("last_used_at", UtcDateTime),
    sa.Index(None, "key_id"),
)

ssh_passwords = sa.Table(
    "ssh_passwords",
    metadata,
    sa.Column("hash", sa.String(64), primary_key=True),
    sa.Column("sandbox_id", sa.String(32), sa.ForeignKey("sandboxes.id"), nullable=False),
    sa.Column("key_id", sa.String(32), sa.ForeignKey("keys.id", ondelete="CASCADE"), nullable=False),
    sa.Column("expires_at", UtcDateTime, nullable=False),
    sa.Index(None, "sandbox_id"),
    sa.Index(None, "key_id"),
    sa.Index(None, "expires_at"),
)

preview_tokens = sa.Table(
    "preview_tokens",
    metadata,
    sa.Column("sandbox_id", sa.String(32), sa.ForeignKey("sandboxes.id"), primary_key=True),
    sa.Column("port", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("token", sa.String(64), nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
)

preview_links = sa.Table(
    "preview_links",  # those that were used, until they expire: none works twice
    metadata,
    sa.Column("nonce", sa.String(32), primary_key=True),
    sa.Column("expires_at", UtcDateTime, nullable=False),
    sa.Index(None, "expires_at"),
)

domains = sa.Table(
    "domains",
    metadata,
    sa.Column("domain", sa.String(253), primary_key=True),
    sa.Column("sandbox_id", sa.String(32), sa.ForeignKey("sandboxes.id")),  # null: mapped to nothing
    sa.Column("port", sa.Integer),
    sa.Column("token", sa.String(64), nullable=False),  # what the TXT record must hold
    sa.Column("verified_at", UtcDateTime),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Index(None, "sandbox_id"),
)

repos = sa.Table(
    "repos",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("description", sa.Text),
    sa.Column("visibility", sa.String(16), nullable=False),
    sa.Column("ready", sa.Boolean, nullable=False),  # as with snapshots
    sa.Column("quota_bytes", sa.BigInteger, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("updated_at", UtcDateTime, nullable=False),
    sa.Column("pushed_at", UtcDateTime),
    sa.Index(None, "created_at", "id"),
)

lfs_locks = sa.Table(
    "lfs_locks",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("repo_id", sa.String(32), sa.ForeignKey("repos.id", ondelete="CASCADE"), nullable=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("owner_id", sa.String(32), nullable=False),
    sa.Column("owner_name", sa.Text, nullable=False),
    sa.Column("locked_at", UtcDateTime, nullable=False),
    sa.UniqueConstraint("repo_id", "path"),
)

identities = sa.Table(
    "identities",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("managed", sa.Text, unique=True),  # what for, if Forkyard made it for itself
    sa.Column("created_at", UtcDateTime, nullable=False),
)

tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("identity_id", sa.String(32), sa.ForeignKey("identities.id", ondelete="CASCADE"), nullable=False),
    sa.Column("hash", sa.String(64), nullable=False, unique=True),
    sa.Column("prefix", sa.String(16), nullable=False),
    sa.Column("name", sa.Text),
    sa.Column("sandbox_id", sa.String(32)),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("expires_at", UtcDateTime),
    sa.Column("last_used_at", UtcDateTime),
    sa.Index(None, "identity_id"),
)

repo_grants = sa.Table(
    "repo_grants",
    metadata,
    sa.Column("identity_id", sa.String(32), sa.ForeignKey("identities.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("repo_id", sa.String(32), sa.ForeignKey("repos.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("permission", sa.String(16), nullable=False),
    sa.Column("granted_at", UtcDateTime, nullable=False),
    sa.Column("granted_by", sa.Text, nullable=False),
    sa.Index(None, "repo_id"),
)

sandbox_grants = sa.Table(
    "sandbox_grants",
    metadata,
    sa.Column("identity_id", sa.String(32), sa.ForeignKey("identities.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("sandbox_id", sa.String(32), sa.ForeignKey("sandboxes.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("allowed_users", sa.JSON(none_as_null=True)),  # null: any
    sa.Column("granted_at", UtcDateTime, nullable=False),
    sa.Column("granted_by", sa.Text, nullable=False),
)

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("at", UtcDateTime, nullable=False),
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
    sa.Index(None, "actor_id", "id"),
    sqlite_autoincrement=True,  # as with events
)

git_triggers = sa.Table(
    "git_triggers",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("repo_id", sa.String(32), sa.ForeignKey("repos.id", ondelete="CASCADE"), nullable=False),
    sa.Column("events", sa.JSON, nullable=False),
    sa.Column("branches", sa.JSON, nullable=False),
    sa.Column("tags", sa.JSON, nullable=False),
    sa.Column("paths", sa.JSON, nullable=False),
    sa.Column("action", sa.Text, nullable=False),  # sealed: it may hold headers, secrets, an environment
    sa.Column("enabled", sa.Boolean, nullable=False),
    sa.Column("key_id", sa.String(32), nullable=False),  # on whose behalf
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("updated_at", UtcDateTime, nullable=False),
    sa.Index(None, "repo_id"),
)

git_seen_refs = sa.Table(
    "git_seen_refs",  # where refs were when triggers were last told; only of repositories that have any
    metadata,
    sa.Column("repo_id", sa.String(32), sa.ForeignKey("repos.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("ref", sa.String(512), primary_key=True),
    sa.Column("sha", sa.String(64), nullable=False),
)

git_deliveries = sa.Table(
    "git_deliveries",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("trigger_id", sa.String(32), sa.ForeignKey("git_triggers.id", ondelete="CASCADE"), nullable=False),
    sa.Column("event", sa.String(32), nullable=False),
    sa.Column("ref", sa.Text, nullable=False),
    sa.Column("before", sa.String(64), nullable=False),
    sa.Column("after", sa.String(64), nullable=False),
    sa.Column("payload", sa.JSON, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("tries", sa.Integer, nullable=False),  # since it was last begun
    sa.Column("attempts", sa.JSON, nullable=False),  # how the last ones went
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("next_at", UtcDateTime),
    sa.Column("finished_at", UtcDateTime),
    sa.Index(None, "trigger_id", "created_at"),
    sa.Index(None, "status", "next_at"),
)

git_remotes = sa.Table(
    "git_remotes",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("repo_id", sa.String(32), sa.ForeignKey("repos.id", ondelete="CASCADE"), nullable=False),
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("direction", sa.String(8), nullable=False),
    sa.Column("branches", sa.JSON, nullable=False),
    sa.Column("tags", sa.Boolean, nullable=False),
    sa.Column("username", sa.Text, nullable=False),
    sa.Column("secret", sa.Text),  # name of a stored one
    sa.Column("github_app", sa.JSON(none_as_null=True)),
    sa.Column("poll_s", sa.Float),
    sa.Column("hook_secret", sa.Text, nullable=False),  # sealed
    sa.Column("review", sa.JSON(none_as_null=True)),  # how pull requests there are reviewed
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("synced_at", UtcDateTime),
    sa.Column("error", sa.Text),
    sa.UniqueConstraint("repo_id", "name"),
)

git_remote_refs = sa.Table(
    "git_remote_refs",  # both sides as of the last sync, and where they last agreed: tells a deletion from a new branch
    metadata,
    sa.Column("remote_id", sa.String(32), sa.ForeignKey("git_remotes.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("ref", sa.String(512), primary_key=True),
    sa.Column("agreed_sha", sa.String(64)),
    sa.Column("local_sha", sa.String(64)),
    sa.Column("remote_sha", sa.String(64)),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("detail", sa.Text),
)

reviews = sa.Table(
    "reviews",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("key", sa.String(300), nullable=False, unique=True),  # two requests with the same one are one review
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("repo_id", sa.String(32), sa.ForeignKey("repos.id", ondelete="CASCADE")),  # null: of GitHub
    sa.Column("request", sa.JSON, nullable=False),
    sa.Column("target", sa.JSON, nullable=False),
    sa.Column("asked_by", sa.JSON, nullable=False),
    sa.Column("dossier", sa.JSON(none_as_null=True)),
    sa.Column("verdict", sa.JSON(none_as_null=True)),
    sa.Column("posted", sa.JSON(none_as_null=True)),
    sa.Column("error", sa.Text),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("ended_at", UtcDateTime),
    sa.Index(None, "repo_id", "created_at"),
    sa.Index(None, "created_at", "id"),
)

volumes = sa.Table(
    "volumes",  # what is in them is on the host
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.String(63), nullable=False, unique=True),
    sa.Column("size_mib", sa.Integer, nullable=False),
    sa.Column("key_id", sa.String(32)),
    sa.Column("writer", sa.String(32)),  # the sandbox that has it read-write
    sa.Column("ready", sa.Boolean, nullable=False),  # not: being made or removed
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Index(None, "writer"),
)

layers = sa.Table(
    "layers",  # snapshots of running machines, by the hash of all that went into them
    metadata,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("snapshot_id", sa.String(32), nullable=False),  # may be gone: then there is no such layer
    sa.Column("parent_key", sa.String(64)),
    sa.Column("inputs", sa.JSON, nullable=False),  # name, digest and a short text of each, to say what differs
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("used_at", UtcDateTime, nullable=False),
    sa.Index(None, "used_at"),
)

builds = sa.Table(
    "builds",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("key_id", sa.String(32), nullable=False),  # on whose behalf
    sa.Column("request", sa.JSON, nullable=False),
    sa.Column("layers", sa.JSON, nullable=False),
    sa.Column("snapshot_id", sa.String(32)),
    sa.Column("failure", sa.JSON(none_as_null=True)),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("finished_at", UtcDateTime),
    sa.Index(None, "created_at", "id"),
    sa.Index(None, "state"),
)

schedules = sa.Table(
    "schedules",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("key_id", sa.String(32), nullable=False),
    sa.Column("name", sa.Text),
    sa.Column("cron", sa.Text, nullable=False),
    sa.Column("timezone", sa.Text, nullable=False),
    sa.Column("retries", sa.Integer, nullable=False),
    sa.Column("request", sa.JSON, nullable=False),
    sa.Column("active", sa.Boolean, nullable=False),
    sa.Column("next_at", UtcDateTime),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("updated_at", UtcDateTime, nullable=False),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("schedule_id", sa.String(32), sa.ForeignKey("schedules.id")),
    sa.Column("key_id", sa.String(32), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("max_attempts", sa.Integer, nullable=False),
    sa.Column("request", sa.JSON, nullable=False),
    sa.Column("outcome", sa.JSON),
    sa.Column("run_at", UtcDateTime, nullable=False),
    sa.Column("next_at", UtcDateTime),
    sa.Column("started_at", UtcDateTime),
    sa.Column("finished_at", UtcDateTime),
    sa.Index(None, "run_at"),
    sa.Index(None, "schedule_id"),
    sa.Index(None, "state"),
)

templates = sa.Table(
    "templates",  # names under which machines were built
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.String(128), nullable=False, unique=True),
    sa.Column("public", sa.Boolean, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("updated_at", UtcDateTime, nullable=False),
)

template_builds = sa.Table(
    "template_builds",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("template_id", sa.String(32), sa.ForeignKey("templates.id", ondelete="CASCADE"), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("size", sa.JSON, nullable=False),
    sa.Column("tags", sa.JSON, nullable=False),  # given when it succeeds
    sa.Column("recipe", sa.JSON(none_as_null=True)),  # its spec, and what commands in its machines run as
    sa.Column("build_id", sa.String(32)),  # may be forgotten by now
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("finished_at", UtcDateTime),
    sa.Index(None, "template_id", "created_at"),
)

template_tags = sa.Table(
    "template_tags",
    metadata,
    sa.Column("template_id", sa.String(32), sa.ForeignKey("templates.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("tag", sa.String(128), primary_key=True),
    sa.Column("build_id", sa.String(36), sa.ForeignKey("template_builds.id", ondelete="CASCADE"), nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
)

template_files = sa.Table(
    "template_files",  # by the hash a client has of them: which upload they are
    metadata,
    sa.Column("hash", sa.String(128), primary_key=True),
    sa.Column("upload", sa.String(80), nullable=False),
)
dev_servers = sa.Table(
    "dev_servers",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.String(64), nullable=False, unique=True),
    sa.Column("state", sa.String(16), nullable=False),  # `starting` until it answers, then `running`
    sa.Column("key_id", sa.String(32), nullable=False),  # on whose behalf
    sa.Column("request", sa.JSON, nullable=False),
    sa.Column("repo_id", sa.String(32)),
    sa.Column("repo_url", sa.Text, nullable=False),
    sa.Column("branch", sa.String(256), nullable=False),
    sa.Column("sandbox_id", sa.String(32)),
    sa.Column("trigger_id", sa.String(32)),
    sa.Column("setup", sa.JSON, nullable=False),
    sa.Column("sha", sa.String(64), nullable=False),
    sa.Column("error", sa.Text),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("updated_at", UtcDateTime, nullable=False),
)
