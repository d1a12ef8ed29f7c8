"""What the ledger tells Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.ledger.batches import Batch
from services.ledger.records import LOG_TABLES, UNREADABLE


class LedgerMetrics:
    """One per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.active = Gauge(
            "vertumnus_ledger_active", "1 while this process copies, 0 while it waits", registry=registry
        )
        self.lag_events = Gauge(
            "vertumnus_ledger_lag_events", "Events in the stream that are not in the record yet", registry=registry
        )
        self.unread_share = Gauge(
            "vertumnus_ledger_unread_share", "Those events as a share of what the stream holds", registry=registry
        )
        self._batch_seconds = Histogram(
            "vertumnus_ledger_batch_seconds", "From a full batch to its commit", registry=registry
        )
        self._events = Counter("vertumnus_ledger_events", "Rows added to the record", ["table"], registry=registry)
        self._unreadable = Counter(
            "vertumnus_ledger_unreadable_events", "Messages that are no event of ours", registry=registry
        )
        for table in LOG_TABLES:
            self._events.labels(table)

    def count(self, batch: Batch, seconds: float) -> None:
        """After a commit."""
        self._batch_seconds.observe(seconds)
        for table in LOG_TABLES:
            self._events.labels(table).inc(len(batch.rows[table]))
        self._unreadable.inc(sum(link.record.type == UNREADABLE for link in batch.rows["decisions"]))
