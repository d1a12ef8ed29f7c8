"""The read models: folds of the record, written in the same transaction as it, and rebuilt from it at any time.

Revision ID: 0002
Revises: 0001
"""

from alembic import op

revision = "0002"
down_revision = "0001"

# `…_log` is logs.number: with the sequence it orders events over all logs.
TABLES = {
    "sources": """
        source text PRIMARY KEY,
        first_seq bigint NOT NULL,
        last_seq bigint NOT NULL
    """,
    "nodes": """
        node text PRIMARY KEY,
        alive boolean NOT NULL,
        cordoned boolean NOT NULL,
        incarnation bigint NOT NULL,
        epoch bigint NOT NULL,
        composition jsonb NOT NULL,
        draining jsonb NOT NULL,
        adopted jsonb NOT NULL,
        spec jsonb
    """,
    "workers": """
        worker text PRIMARY KEY,
        node text NOT NULL,
        first_rank bigint NOT NULL,
        degree bigint NOT NULL,
        capacity_us bigint NOT NULL,
        schedulable boolean NOT NULL
    """,
    "epochs": """
        log integer NOT NULL,
        node text NOT NULL,
        epoch bigint NOT NULL,
        status text,
        policy text,
        reason text,
        old_composition jsonb,
        new_composition jsonb,
        planned_ns bigint,
        drain_started_ns bigint,
        ended_ns bigint,
        drain_us bigint,
        switch_us bigint,
        reconciled_id uuid,
        PRIMARY KEY (log, node, epoch)
    """,
    "requests": """
        request text PRIMARY KEY,
        source text,
        tenant text,
        model text,
        prompt_tokens bigint,
        max_tokens bigint,
        slo_us bigint,
        received_id uuid,
        received_log integer,
        received_seq bigint,
        received_ns bigint,
        attempts bigint,
        assigned_ns bigint,
        worker text,
        degree bigint,
        decode_worker text,
        policy text,
        predicted_queue_us bigint,
        predicted_service_us bigint,
        predicted_cached_tokens bigint,
        price_us bigint,
        redirect_reason text,
        queue_us bigint,
        fetch_us bigint,
        prefill_us bigint,
        computed_tokens bigint,
        cached_tokens bigint,
        handoff_us bigint,
        ttft_us bigint,
        tpot_us bigint,
        output_tokens bigint,
        ended text,
        end_reason text,
        end_id uuid,
        end_log integer,
        end_seq bigint,
        end_ns bigint
    """,
    "windows": """
        log integer NOT NULL,
        k bigint NOT NULL,
        closed_ns bigint NOT NULL,
        data jsonb NOT NULL,
        PRIMARY KEY (log, k)
    """,
    "parameters": """
        log integer NOT NULL,
        stream_seq bigint NOT NULL,
        time_ns bigint NOT NULL,
        type text NOT NULL,
        asked_by text NOT NULL,
        reason text NOT NULL,
        changes jsonb NOT NULL,
        value jsonb NOT NULL,
        PRIMARY KEY (log, stream_seq)
    """,
    "replicas": """
        operation text PRIMARY KEY,
        status text,
        kind text,
        z text,
        degree bigint,
        sources jsonb,
        worker text,
        blocks bigint,
        score double precision,
        copy_us bigint,
        reason text,
        requested_ns bigint,
        ended_ns bigint
    """,
    # What each worker holds, as far as its events are believed. `report_…` is where an unfinished full report began.
    "caches": """
        worker text PRIMARY KEY,
        incarnation bigint NOT NULL,
        number bigint NOT NULL,
        trust text NOT NULL,
        blocks bigint NOT NULL,
        next_run bigint NOT NULL,
        report_log integer,
        report_seq bigint
    """,
    # Consecutive blocks below `parent` (NULL for the root), 16 bytes each.
    "cached_runs": """
        worker text NOT NULL,
        run bigint NOT NULL,
        parent bytea,
        block_ids bytea NOT NULL,
        PRIMARY KEY (worker, run)
    """,
    # Events that are recorded and break a rule of the folds: a sender's fault, for an operator to read.
    "unfolded": """
        log integer NOT NULL,
        stream_seq bigint NOT NULL,
        error text NOT NULL,
        PRIMARY KEY (log, stream_seq)
    """,
}

INDEXES = (
    "CREATE INDEX requests_open ON requests (received_log, received_seq) WHERE ended IS NULL",
    "CREATE INDEX requests_ended ON requests (end_log, end_seq) WHERE ended IS NOT NULL",
    "CREATE INDEX workers_of_node ON workers (node)",
)


def upgrade() -> None:
    for table, columns in TABLES.items():
        op.execute(f"CREATE TABLE {table} ({columns})")
    # A request's row changes some five times in its life: room on its page keeps those changes off the indexes.
    op.execute("ALTER TABLE requests SET (fillfactor = 60)")
    for statement in INDEXES:
        op.execute(statement)
    op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {', '.join(TABLES)} TO vertumnus_ledger")
