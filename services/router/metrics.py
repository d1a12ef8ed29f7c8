"""What the router shows to Prometheus: `vertumnus_router_*`, units in the names, labels from small fixed sets."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

TTFT_BUCKETS_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
DECISION_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
ASSIGN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


class RouterMetrics:
    """One per process, in that process' registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.ended = Counter(
            "vertumnus_router_requests", "Received requests that have ended", ["outcome"], registry=registry
        )
        self.refused = Counter(
            "vertumnus_router_refusals", "Requests refused before they were received", ["reason"], registry=registry
        )
        self.redirected = Counter(
            "vertumnus_router_redirects", "Attempts that went no further", ["reason"], registry=registry
        )
        self.ttft_s = Histogram(
            "vertumnus_router_ttft_seconds",
            "From a request's arrival to its first token, at the router",
            registry=registry,
            buckets=TTFT_BUCKETS_S,
        )
        self.decision_s = Histogram(
            "vertumnus_router_decision_seconds",
            "Processor time of one placement",
            registry=registry,
            buckets=DECISION_BUCKETS_S,
        )
        self.assign_s = Histogram(
            "vertumnus_router_assign_seconds",
            "From a request's arrival until its first assignment is stored and sent",
            registry=registry,
            buckets=ASSIGN_BUCKETS_S,
        )
        self.prompt_tokens = Counter(
            "vertumnus_router_prompt_tokens",
            "Prompt tokens of completed requests, by source",
            ["source"],
            registry=registry,
        )
        self.output_tokens = Counter(
            "vertumnus_router_output_tokens", "Tokens given to clients of completed requests", registry=registry
        )

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Show a number that lives elsewhere."""
        Gauge(f"vertumnus_router_{name}", text, registry=self._registry).set_function(read)
