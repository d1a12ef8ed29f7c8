"""The agents of one process: one per node, each with its own fold of the log and its own outbox.

A node's events need a source of their own, because every source is numbered without gaps and has one writer.
"""

from services.worker.agent import NodeAgent
from services.worker.decider import evolve, initial
from services.worker.engines import MakeEngine, coefficients_of
from services.worker.metrics import WorkerMetrics
from services.worker.ports import NodePorts
from services.worker.settings import WorkerSettings
from shared.contracts.envelope import Channel
from shared.contracts.ids import NodeId, Source
from shared.runtime.appending import Identity, Sealer
from shared.runtime.outbox import Outbox
from shared.runtime.projection import Projection
from shared.runtime.service import Runtime
from shared.runtime.telemetry import watch_log


def host(settings: WorkerSettings, runtime: Runtime, make_engine: MakeEngine) -> list[NodeAgent]:
    """An agent, not started, for each node of the settings."""
    metrics = WorkerMetrics(runtime.metrics)
    agents = [_agent(node, settings, runtime, make_engine, metrics) for node in settings.node_ids]
    # All of them fold the control subject over one connection: the first one's lag is everybody's.
    watch_log(runtime.metrics, runtime.clock, agents[0].projection)
    return agents


def _agent(
    node: NodeId, settings: WorkerSettings, runtime: Runtime, make_engine: MakeEngine, metrics: WorkerMetrics
) -> NodeAgent:
    subjects, clock = runtime.subjects, runtime.clock
    state = initial(node, settings.queue_max)
    filters = (subjects.control, subjects.event(Channel.WORKERS, node))
    projection = Projection(runtime.log, filters, state, evolve, runtime.keepsake)
    identity = Identity(settings.pool, Source(f"{runtime.source}-{node}"), node)
    outbox = Outbox(projection, Sealer(identity, subjects, clock, runtime.ids), clock)
    ports = NodePorts(
        node=node,
        source=identity.source,
        state=state,
        outbox=outbox,
        clock=clock,
        bus=runtime.bus,
        bulk=runtime.bulk,
        subjects=subjects,
        metrics=metrics,
        coefficients=coefficients_of(settings),
        step_limits=settings.step_limits,
        hung_step_s_min=settings.hung_step_s_min,
    )
    return NodeAgent(ports, projection, lambda: make_engine(node))
