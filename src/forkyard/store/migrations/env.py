"""Alembic's entry point. The connection comes from `store.migrate`; there is no alembic.ini."""

from alembic import context

from forkyard.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite cannot alter most things in place
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
