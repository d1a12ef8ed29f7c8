"""What everything of one node shares: its state, the way to the log, the buses, and its limits."""

from typing import NamedTuple

from services.worker.composer import StepLimits
from services.worker.decider import State
from services.worker.metrics import WorkerMetrics
from shared.contracts.ids import NodeId, Source
from shared.contracts.subjects import Subjects
from shared.model.cost import Coefficients
from shared.runtime.clock import Clock
from shared.runtime.outbox import Outbox
from shared.runtime.ports import Bus


class NodePorts(NamedTuple):
    """`bulk` carries claims and token frames. `coefficients` predict this node's prefills, in
    seconds of the clock. An
    `outbox` that is full ends the process: jobs are accepted only while there is room."""

    node: NodeId
    source: Source
    state: State
    outbox: Outbox
    clock: Clock
    bus: Bus
    bulk: Bus
    subjects: Subjects
    metrics: WorkerMetrics
    coefficients: Coefficients
    step_limits: StepLimits
    hung_step_s_min: float
