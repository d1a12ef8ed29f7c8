"""What the controller shows of its work."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.contracts.envelope import EventData
from shared.contracts.events import EpochAborted, EpochCommitted, WindowClosed
from shared.model.cost import US_PER_S

DRAIN_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15)
SWITCH_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 2)


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

        self._reconfigurations = Counter(
            "vertumnus_reconfigurations", "Sagas that ended, by how", ["outcome"], registry=registry
        )
        self._drain = Histogram(
            "vertumnus_drain_seconds",
            "Drains of committed reconfigurations",
            buckets=DRAIN_BUCKETS_S,
            registry=registry,
        )
        self._switch = Histogram(
            "vertumnus_switch_seconds", "Slowest rank of each switch", buckets=SWITCH_BUCKETS_S, registry=registry
        )

    def show(self, data: EventData) -> None:
        """One event of the log, whoever decided it."""
        match data:
            case WindowClosed():
                self._show_window(data)
            case EpochAborted():
                self._reconfigurations.labels("aborted").inc()
            case EpochCommitted() if data.switch_us:
                self._reconfigurations.labels("committed").inc()
                self._drain.observe(data.drain_us / US_PER_S)
                self._switch.observe(data.switch_us / US_PER_S)
            case _:
                pass

    def _show_window(self, window: WindowClosed) -> None:
        """A share of nothing is shown as NaN."""
        self._demand.set(window.demand_us / US_PER_S)
        self._capacity.set(window.capacity_us / US_PER_S)
        self._attainment.set(float("nan") if window.attainment is None else window.attainment)
        self._hit_rate.set(float("nan") if window.hit_rate is None else window.hit_rate)
