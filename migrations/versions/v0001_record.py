"""The record: the log tables, append-only by grant and by trigger, and the checkpoint.

Revision ID: 0001
Revises:
"""

from alembic import op

revision = "0001"
down_revision = None

APPEND_ONLY = ("logs", "decisions", "block_events", "repeats", "gaps")

LOGS = """
-- One row per incarnation of the stream. `stream` is the identity in the stream's metadata; a stream that was restored
-- from an older copy keeps it and still begins a new log.
CREATE TABLE logs (
    log uuid PRIMARY KEY,
    number integer NOT NULL UNIQUE,
    stream uuid NOT NULL,
    pool text NOT NULL,
    opened_at timestamptz NOT NULL DEFAULT now(),
    predecessor uuid REFERENCES logs,
    predecessor_seq bigint
)
"""

# No foreign key to logs: it would cost a look-up per event, and the writer holds the log's row anyway.
# Columns besides raw and chain are NULL for bytes that are no event; those have the type 'unreadable'.
EVENT_COLUMNS = """
    log uuid NOT NULL,
    stream_seq bigint NOT NULL CHECK (stream_seq > 0),
    id uuid,
    type text NOT NULL,
    version integer NOT NULL,
    pool text,
    source text,
    source_seq bigint,
    time_ns bigint,
    correlation text,
    causation uuid,
    raw bytea NOT NULL,
    chain bytea NOT NULL CHECK (length(chain) = 32)
"""

DECISIONS = f"""
CREATE TABLE decisions ({EVENT_COLUMNS},
    PRIMARY KEY (log, stream_seq),
    UNIQUE (id),
    UNIQUE (source, source_seq)
)
"""

BLOCK_EVENTS = f"""
CREATE TABLE block_events ({EVENT_COLUMNS},
    day date NOT NULL,
    PRIMARY KEY (log, stream_seq, day),
    UNIQUE (id, day),
    UNIQUE (source, source_seq, day)
) PARTITION BY RANGE (day)
"""

REPEATS = """
-- What a sender appended again, or numbered as it had numbered something before: kept, and folded by nobody.
CREATE TABLE repeats (
    log uuid NOT NULL,
    stream_seq bigint NOT NULL,
    id uuid NOT NULL,
    source text NOT NULL,
    source_seq bigint NOT NULL,
    raw bytea NOT NULL,
    chain bytea NOT NULL CHECK (length(chain) = 32),
    PRIMARY KEY (log, stream_seq)
)
"""

GAPS = """
-- Sequences the stream had dropped before they were recorded, accepted by an operator.
CREATE TABLE gaps (
    log uuid NOT NULL REFERENCES logs,
    from_seq bigint NOT NULL CHECK (from_seq > 0),
    to_seq bigint NOT NULL CHECK (to_seq >= from_seq),
    accepted_at timestamptz NOT NULL DEFAULT now(),
    accepted_by text NOT NULL,
    reason text NOT NULL,
    PRIMARY KEY (log, from_seq)
)
"""

CHECKPOINTS = """
-- How far each log has been copied, and the heads of the three chains there. The newest log's row is the active one.
-- `digest` is that of the last message, empty after a gap. While `gap_to` is set, the stream goes on only after it.
CREATE TABLE checkpoints (
    log uuid PRIMARY KEY REFERENCES logs,
    stream_seq bigint NOT NULL,
    digest bytea NOT NULL,
    gap_to bigint,
    decisions_head bytea NOT NULL,
    block_events_head bytea NOT NULL,
    repeats_head bytea NOT NULL
)
"""

INDEXES = (
    "CREATE INDEX decisions_of_type ON decisions (type, log, stream_seq)",
    "CREATE INDEX decisions_of_correlation ON decisions (correlation) WHERE correlation IS NOT NULL",
    "CREATE INDEX block_events_of_correlation ON block_events (correlation) WHERE correlation IS NOT NULL",
)

REFUSE = """
CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% on %: the record is append-only', TG_OP, TG_TABLE_NAME USING ERRCODE = 'insufficient_privilege';
END $$
"""


def refuse_on(table: str) -> str:
    """The trigger that holds for everybody, the owner included."""
    return f"""
    CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table}
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()
    """


# Runs with its owner's rights: the service may not create tables. Days far from today, which only a wrong clock names,
# share the default partition, so that a wrong clock cannot make tables without end.
ENSURE_DAY = """
CREATE FUNCTION ensure_block_day(wanted date) RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    partition text := 'block_events_' || to_char(wanted, 'YYYYMMDD');
BEGIN
    IF abs(wanted - (now() AT TIME ZONE 'UTC')::date) > 7 OR to_regclass(partition) IS NOT NULL THEN
        RETURN;
    END IF;
    PERFORM 1 FROM block_events_other WHERE day = wanted LIMIT 1;
    IF FOUND THEN
        RETURN;
    END IF;
    EXECUTE format('CREATE TABLE %I PARTITION OF block_events FOR VALUES FROM (%L) TO (%L)', partition, wanted, wanted + 1);
    EXECUTE format('CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON %I '
                   'FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()', partition);
END $$
"""

PIN_SEARCH_PATH = """
DO $$ BEGIN
    EXECUTE format('ALTER FUNCTION ensure_block_day(date) SET search_path = %I, pg_temp', current_schema());
END $$
"""

# Roles belong to the whole server: another database's migration may have made this one, or be making it.
ROLE = """
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'vertumnus_ledger') THEN
        CREATE ROLE vertumnus_ledger NOLOGIN;
    END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN
    NULL;
END $$
"""

# Postgres 16 and newer give a role's creator no right to become it. Another owner's role must have been granted to us.
MEMBERSHIP = """
DO $$ BEGIN
    IF NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
        EXECUTE format('GRANT vertumnus_ledger TO %I', current_user);
    END IF;
EXCEPTION WHEN insufficient_privilege THEN
    IF NOT pg_has_role(current_user, 'vertumnus_ledger', 'MEMBER') THEN
        RAISE;
    END IF;
END $$
"""

USAGE = """
DO $$ BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO vertumnus_ledger', current_schema());
END $$
"""

GRANTS = (
    USAGE,
    f"GRANT SELECT, INSERT ON {', '.join(APPEND_ONLY)} TO vertumnus_ledger",
    "GRANT SELECT, INSERT, UPDATE ON checkpoints TO vertumnus_ledger",
    "REVOKE ALL ON FUNCTION ensure_block_day(date) FROM PUBLIC",
    "GRANT EXECUTE ON FUNCTION ensure_block_day(date) TO vertumnus_ledger",
)


def upgrade() -> None:
    for statement in (LOGS, DECISIONS, BLOCK_EVENTS, REPEATS, GAPS, CHECKPOINTS, *INDEXES, REFUSE):
        op.execute(statement)
    op.execute("CREATE TABLE block_events_other PARTITION OF block_events DEFAULT")
    for table in (*APPEND_ONLY, "block_events_other"):
        op.execute(refuse_on(table))
    for statement in (ENSURE_DAY, PIN_SEARCH_PATH, ROLE, MEMBERSHIP, *GRANTS):
        op.execute(statement)
