"""Days of block events can be dropped: whole, and only once the record says so.

Revision ID: 0004
Revises: 0003
"""

from alembic import op

revision = "0004"
down_revision = "0003"

# Runs with its owner's rights: the service may drop nothing else. It gives up after two seconds instead of stopping the copy
# behind somebody who reads a day for minutes; the ledger tries again.
DROP_DAY = """
CREATE FUNCTION drop_block_day(wanted date) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET lock_timeout = '2s' AS $$
DECLARE
    partition text := 'block_events_' || to_char(wanted, 'YYYYMMDD');
BEGIN
    IF to_regclass(partition) IS NULL THEN
        RETURN false;
    END IF;
    PERFORM 1 FROM decisions
    WHERE type = 'block-day-dropped' AND convert_from(raw, 'UTF8')::jsonb #>> '{data,day}' = wanted::text;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no decision of the record drops %', wanted USING ERRCODE = 'insufficient_privilege';
    END IF;
    EXECUTE format('DROP TABLE %I', partition);
    RETURN true;
END $$
"""

PIN_SEARCH_PATH = """
DO $$ BEGIN
    EXECUTE format('ALTER FUNCTION drop_block_day(date) SET search_path = %I, pg_temp', current_schema());
END $$
"""


def upgrade() -> None:
    for statement in (
        DROP_DAY,
        PIN_SEARCH_PATH,
        "REVOKE ALL ON FUNCTION drop_block_day(date) FROM PUBLIC",
        "GRANT EXECUTE ON FUNCTION drop_block_day(date) TO vertumnus_ledger",
    ):
        op.execute(statement)
