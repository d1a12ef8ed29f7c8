"""What operators see of a worker process. Labels are bounded: nodes of this process, degrees, outcomes."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.contracts.ids import NodeId

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class WorkerMetrics:
    """One per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.prefill_s = Histogram(
            "vertumnus_worker_prefill_seconds",
            "Engine time of a prefill",
            ["degree"],
            registry=registry,
            buckets=SECONDS,
        )
        self.queue_s = Histogram(
            "vertumnus_worker_queue_seconds", "From acceptance to the step", registry=registry, buckets=SECONDS
        )
        self.ended = Counter(
            "vertumnus_worker_prefills", "Accepted assignments by their end", ["end"], registry=registry
        )
        self.refused = Counter("vertumnus_worker_refusals", "Refused assignments", ["reason"], registry=registry)
        self.tokens = Counter(
            "vertumnus_worker_prompt_tokens", "Prompt tokens by where from", ["source"], registry=registry
        )
        self.lives = Counter("vertumnus_worker_incarnations", "Engine lives begun", ["node"], registry=registry)
        self._jobs = Gauge(
            "vertumnus_worker_jobs", "Open jobs: queued, in prefill, streaming", ["node"], registry=registry
        )
        self._unstored = Gauge(
            "vertumnus_worker_outbox_events",
            "Recorded events the log has not acknowledged",
            ["node"],
            registry=registry,
        )

    def watch(self, node: NodeId, jobs: Callable[[], float], unstored: Callable[[], float]) -> None:
        """Read a node's gauges whenever they are scraped."""
        self._jobs.labels(node).set_function(jobs)
        self._unstored.labels(node).set_function(unstored)
