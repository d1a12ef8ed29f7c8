"""Logs and metrics that every service has."""

import logging
import sys
from collections.abc import Callable
from typing import Any

import orjson
import structlog
from prometheus_client import CollectorRegistry, Gauge, GCCollector, ProcessCollector
from structlog.types import EventDict, Processor, WrappedLogger

from shared.contracts.envelope import Stored
from shared.runtime.clock import Clock
from shared.runtime.outbox import Outbox
from shared.runtime.projection import Projection

QUIET_LOGGERS = {
    "asyncio": logging.WARNING,
    "nats": logging.WARNING,
    "httpx": logging.WARNING,
    "uvicorn": logging.ERROR,
}
"""What libraries are heard from up. `NatsLink` tells what happens to a connection; uvicorn warns of every malformed request,
and clients must not be able to fill a log."""


def configure_logging(service: str, source: str, level: str) -> None:
    """JSON lines on stderr, each with the service and its source. Payloads, prompts and tokens are never logged."""

    def stamp(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {"service": service, "source": source, **event}

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        stamp,
    ]
    threshold = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer(serializer=_to_json)],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(serializer=_to_json),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=threshold, force=True)
    for name, heard_from in QUIET_LOGGERS.items():
        logging.getLogger(name).setLevel(max(threshold, heard_from))


def _to_json(event: EventDict, **_: object) -> str:
    return orjson.dumps(event, default=repr).decode()


def process_metrics() -> CollectorRegistry:
    """A registry of one process, with its CPU, memory, files and garbage collection."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def watch_log(
    metrics: CollectorRegistry, clock: Clock, projection: Projection[Any], outbox: Outbox | None = None
) -> None:
    """Show how far a service has folded the log, and what it has not got rid of."""
    lag = Gauge(
        "vertumnus_fold_lag_seconds",
        "Age of the newest folded event when it was folded (clocks of two machines)",
        registry=metrics,
    )

    def measure(stored: Stored) -> None:
        lag.set((clock.now_ns() - stored.event.time_ns) / 1e9)

    projection.listen(measure)
    _gauge(metrics, "vertumnus_seen_seq", "Stream sequence of the newest folded event", lambda: projection.seen_seq)
    if outbox is not None:
        _gauge(
            metrics, "vertumnus_outbox_events", "Recorded events the log has not acknowledged", lambda: outbox.events
        )


def _gauge(metrics: CollectorRegistry, name: str, text: str, read: Callable[[], float]) -> None:
    Gauge(name, text, registry=metrics).set_function(read)
