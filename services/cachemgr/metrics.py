"""What the cache manager shows of its work."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.contracts.events import CacheScanCompleted


class Metrics:
    """One per process, in its registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.term = Gauge("vertumnus_cachemgr_term", "Term of this leader, 0 for a standby", registry=registry)
        self.reports_asked = Counter(
            "vertumnus_cache_reports_asked", "Full reports asked of nodes whose cache is in doubt", registry=registry
        )
        self.drifted_blocks = Gauge(
            "vertumnus_cache_drifted_blocks",
            "Blocks about which workers' reports have contradicted what their events had said",
            registry=registry,
        )
        self._nodes = Gauge("vertumnus_trie_nodes", "Blocks in the global prefix trie", registry=registry)
        self._copies = Gauge("vertumnus_trie_copies", "Blocks held, counted once per worker", registry=registry)
        self._candidates = Gauge(
            "vertumnus_scan_candidates", "Candidates of the last recorded scan", ["list"], registry=registry
        )

        self.operations = Counter(
            "vertumnus_cache_operations", "Copies and reclamations that have ended", ["outcome"], registry=registry
        )

        self._started = Gauge(
            "vertumnus_cachemgr_start_events",
            "Events of the log that this process folded at its start",
            registry=registry,
        )
        self._resumed = Gauge(
            "vertumnus_cachemgr_resumed_seq", "Place of the snapshot it went on from, 0 for none", registry=registry
        )
        self._snapshot_seq = Gauge(
            "vertumnus_cachemgr_snapshot_seq", "Place of the last snapshot this leader has kept", registry=registry
        )
        self._snapshot_bytes = Gauge("vertumnus_cachemgr_snapshot_bytes", "Its bytes", registry=registry)
        self._snapshot_seconds = Gauge(
            "vertumnus_cachemgr_snapshot_seconds", "What it took to write and keep it", registry=registry
        )

    def show_start(self, resumed_seq: int, events: int) -> None:
        """From what this process has begun."""
        self._resumed.set(resumed_seq)
        self._started.set(events)

    def show_snapshot(self, seq: int, size_bytes: int, took_s: float) -> None:
        """One that is kept."""
        self._snapshot_seq.set(seq)
        self._snapshot_bytes.set(size_bytes)
        self._snapshot_seconds.set(took_s)

    def show_scan(self, scan: CacheScanCompleted) -> None:
        """Sizes as of a recorded scan."""
        self._nodes.set(scan.nodes)
        self._copies.set(scan.holders)
        self._candidates.labels("inter").set(scan.inter_candidates)
        self._candidates.labels("intra").set(scan.intra_candidates)
        self._candidates.labels("reclaim").set(scan.reclaim_candidates)
