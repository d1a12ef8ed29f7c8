"""What the controller shows of its work."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from shared.contracts.events import WindowClosed
from shared.model.cost import US_PER_S


class Metrics:
    """One per process, in its registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.term = Gauge("vertumnus_controller_term", "Term of this leader, 0 for a standby", registry=registry)
        self.refusals = Counter(
            "vertumnus_epoch_refusals",
            "Epochs that a node could not or would not adopt",
            ["node", "reason"],
            registry=registry,
        )
        self.unreadable = Counter(
            "vertumnus_unreadable_heartbeats", "Heartbeats that were not understood", registry=registry
        )
        self._demand = Gauge("vertumnus_window_demand_seconds", "D of the last window", registry=registry)
        self._capacity = Gauge("vertumnus_window_capacity_seconds", "Capacity of the last window", registry=registry)
        self._attainment = Gauge(
            "vertumnus_window_attainment", "Share of prompt tokens served within their SLO", registry=registry
        )
        self._hit_rate = Gauge(
            "vertumnus_window_hit_rate", "Share of prompt tokens that needed no computing", registry=registry
        )

    def show_window(self, window: WindowClosed) -> None:
        """A share of nothing is shown as NaN."""
        self._demand.set(window.demand_us / US_PER_S)
        self._capacity.set(window.capacity_us / US_PER_S)
        self._attainment.set(float("nan") if window.attainment is None else window.attainment)
        self._hit_rate.set(float("nan") if window.hit_rate is None else window.hit_rate)
