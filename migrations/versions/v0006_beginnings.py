"""A record may begin in the middle, where another one was sealed; states of deciders are kept at seals.

Revision ID: 0006
Revises: 0005
"""

from alembic import op

from migrations.versions.v0001_record import refuse_on

revision = "0006"
down_revision = "0005"

BEGINNINGS = """
-- Of a record that was taken in from the middle of another: it has the events of log number `log` behind `stream_seq`, where
-- the chains had these heads. `models` is what the read models were folded to there.
CREATE TABLE beginnings (
    log integer PRIMARY KEY REFERENCES logs (number),
    stream_seq bigint NOT NULL,
    decisions_head bytea NOT NULL,
    block_events_head bytea NOT NULL,
    repeats_head bytea NOT NULL,
    models bytea NOT NULL
)
"""

STATES = """
-- What the deciders had folded right after event `stream_seq` of log number `log`. Derived, like snapshots.
CREATE TABLE states (
    log integer NOT NULL,
    stream_seq bigint NOT NULL,
    content bytea NOT NULL,
    PRIMARY KEY (log, stream_seq)
)
"""

# What is in force, in snapshots; the history of it is in `parameters`.
NEWEST_PARAMETERS = """
CREATE VIEW newest_parameters AS SELECT * FROM parameters ORDER BY log DESC, stream_seq DESC LIMIT 1
"""

GRANTS = (
    "GRANT SELECT, INSERT ON beginnings TO vertumnus_ledger",
    "GRANT SELECT, INSERT, DELETE ON states TO vertumnus_ledger",
    "GRANT SELECT ON newest_parameters TO vertumnus_ledger",
)


def upgrade() -> None:
    for statement in (BEGINNINGS, STATES, NEWEST_PARAMETERS, refuse_on("beginnings"), *GRANTS):
        op.execute(statement)
