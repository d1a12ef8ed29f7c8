"""What the pool was at places of the record, so that the past is folded from the nearest of them.

Revision ID: 0005
Revises: 0004
"""

from alembic import op

revision = "0005"
down_revision = "0004"

SNAPSHOTS = """
-- Right after event `stream_seq` of log number `log`; `time_ns` is the newest of the senders' clocks up to there.
CREATE TABLE snapshots (
    log integer NOT NULL,
    stream_seq bigint NOT NULL,
    time_ns bigint NOT NULL,
    PRIMARY KEY (log, stream_seq)
)
"""

SNAPSHOT_ROWS = """
-- Rows of the read models that hold a state; those that hold a history say themselves when each part of it was.
CREATE TABLE snapshot_rows (
    log integer NOT NULL,
    stream_seq bigint NOT NULL,
    model text NOT NULL,
    value jsonb NOT NULL,
    FOREIGN KEY (log, stream_seq) REFERENCES snapshots ON DELETE CASCADE
)
"""

# What a snapshot has of requests and reconciliations: those under way. Their events say the rest.
OPEN_REQUESTS = """
CREATE VIEW open_requests AS SELECT request, received_id, received_log, received_seq FROM requests WHERE ended IS NULL
"""

OPEN_RECONCILIATIONS = """
CREATE VIEW open_reconciliations AS
SELECT reconciled_id FROM epochs WHERE status <> 'committed' AND reconciled_id IS NOT NULL
"""

# Derived, like the read models: whoever doubts them folds the record from its beginning.
GRANTS = (
    "GRANT SELECT, INSERT, DELETE ON snapshots, snapshot_rows TO vertumnus_ledger",
    "GRANT SELECT ON open_requests, open_reconciliations TO vertumnus_ledger",
)


def upgrade() -> None:
    for statement in (
        SNAPSHOTS,
        SNAPSHOT_ROWS,
        "CREATE INDEX snapshot_rows_of_snapshot ON snapshot_rows (log, stream_seq, model)",
        OPEN_REQUESTS,
        OPEN_RECONCILIATIONS,
        *GRANTS,
    ):
        op.execute(statement)
