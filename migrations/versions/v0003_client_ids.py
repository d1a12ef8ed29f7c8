"""Requests can be found by the id that their client gave them.

Revision ID: 0003
Revises: 0002
"""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.execute("ALTER TABLE requests ADD COLUMN client_digest text")
    op.execute("CREATE INDEX requests_of_client ON requests (client_digest) WHERE client_digest IS NOT NULL")
