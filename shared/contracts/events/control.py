"""The controller's decisions, all on one fenced subject, and what operators asked for through it."""

from itertools import zip_longest
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.contracts.envelope import Channel, EventData, event
from shared.contracts.geometry import Composition, Degree, Rank
from shared.contracts.ids import NodeId, WorkerId, worker_id


@event("leadership-taken", channel=Channel.CONTROL, senders=("controller",))
class LeadershipTaken(EventData):
    """From here on appends of leaders with an older term fail, and agents refuse their commands. The leader has folded
    `kept_events` events that the log had dropped, and the log from `first_seq` on. If it `resumes`, the steps of plans under
    way have their limits anew; before there was this field, a change of leaders counted against them."""

    leader: str
    term: int = Field(ge=1)
    first_seq: int = Field(default=1, ge=1)
    kept_events: int = Field(default=0, ge=0)
    resumes: bool = False


@event("window-closed", channel=Channel.CONTROL, senders=("controller",))
class WindowClosed(EventData):
    """Observation window k: the events with sequence in (from_seq, to_seq] (paper, section 4.3).

    `demand_us` is D, the predicted prefill seconds of first attempts; the long shares count prompts over `long_tokens`,
    by requests and by tokens; attainment is token-weighted, None when nothing completed.

    `signals` are the thresholds that this window passed, `persistence` for how many windows in a row each was passed since
    the last commit. `recent_demand` holds D of the last windows in microseconds per second, this one last, and
    `long_reference` both long shares as of the last commit: what a signal is measured against.
    """

    k: int = Field(ge=1)
    from_seq: int
    to_seq: int
    length_us: int
    requests: int
    completed: int
    prompt_tokens: int
    demand_us: int
    long_tokens: int
    long_request_share: float
    long_token_share: float
    capacity_us: int
    attainment: float | None = None
    hit_rate: float | None = None
    signals: tuple[str, ...] = ()
    persistence: dict[str, int] = Field(default_factory=dict)
    recent_demand: tuple[int, ...] = ()
    long_reference: tuple[float, float] | None = None
    mean_ttft_us: int | None = None


class CommittedWorker(BaseModel):
    """One worker of a committed epoch. `capacity_us` is κ_C: the window demand it carries within the SLO.

    `capacity_version` names the set of coefficients whose profile says so; None for the configured share of a window.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    worker: WorkerId
    first_rank: Rank
    degree: Degree
    capacity_us: int
    capacity_version: str | None = None


class Alternative(BaseModel):
    """One step that was considered, and why it was or was not taken: how long its drain is predicted to last, how many
    blocks its new workers would have to get again (missing copies, each as often as it was lately reused), and what its
    capacity would be."""

    model_config = ConfigDict(frozen=True, extra="allow")

    node: NodeId
    composition: Composition
    drain_us: int
    missing_blocks: int
    score: float | None = None
    capacity_us: int | None = None


@event("reconfiguration-planned", channel=Channel.CONTROL, senders=("controller",))
class ReconfigurationPlanned(EventData):
    """A node is to move from one composition to another in one switch. Ends in exactly one commit or abort of `epoch`.

    `window` is the one that a policy decided after, `capacities_us` κ_C by degree as it counted; an operator's plan has
    neither, and `asked_by` instead.
    """

    node: NodeId
    epoch: int = Field(ge=1)
    policy: str
    reason: str
    old_composition: Composition
    new_composition: Composition
    retiring: tuple[WorkerId, ...]
    coming: tuple[WorkerId, ...]
    alternatives: tuple[Alternative, ...] = ()
    forecast_gain: float | None = None
    window: int | None = None
    capacities_us: dict[int, int] = Field(default_factory=dict)
    asked_by: str | None = None


@event("reconfiguration-advised", channel=Channel.CONTROL, senders=("controller",))
class ReconfigurationAdvised(EventData):
    """What the policy would have planned after this window, had it not been told to advise only. Nothing follows from it."""

    node: NodeId
    policy: str
    reason: str
    old_composition: Composition
    new_composition: Composition
    alternatives: tuple[Alternative, ...] = ()
    forecast_gain: float | None = None
    window: int
    capacities_us: dict[int, int] = Field(default_factory=dict)


@event("forecast-made", channel=Channel.CONTROL, senders=("controller",))
class ForecastMade(EventData):
    """What replays of recent arrivals promise for each pool within reach, as of a window's end.

    `pools` are counts of workers by degree, the pool as it was first, `moves` how many nodes each is away, `scores_ppm` its
    mean TTFT over the best pool's, `errors_ppm` the standard error of its difference from the pool as it was. `replayed` of
    `arrivals` were sampled from the last `stretch_us`. `realised_gain` is by how much the mean TTFT fell from the window
    before the last moves to the one now closed, whatever else has changed.
    """

    window: int = Field(ge=1)
    arrivals: int
    replayed: int
    stretch_us: int
    pools: tuple[dict[int, int], ...]
    moves: tuple[int, ...]
    scores_ppm: tuple[int, ...]
    coefficients: dict[str, float | str]
    realised_gain: float | None = None
    errors_ppm: tuple[int, ...] | None = None


@event("drain-started", channel=Channel.CONTROL, senders=("controller",))
class DrainStarted(EventData):
    """Routers stop placing on these workers when they fold this."""

    node: NodeId
    epoch: int
    workers: tuple[WorkerId, ...]
    deadline_us: int


@event("epoch-committed", channel=Channel.CONTROL, senders=("controller",))
class EpochCommitted(EventData):
    """The node's workers are these and no others. Workers exist only through this event."""

    node: NodeId
    epoch: int = Field(ge=1)
    composition: Composition
    workers: tuple[CommittedWorker, ...]
    drain_us: int = 0
    switch_us: int = 0

    @model_validator(mode="after")
    def _workers_are_the_compositions(self) -> Self:
        rank = 0
        for worker, degree in zip_longest(self.workers, self.composition):
            expected = None if degree is None else (worker_id(self.node, self.epoch, rank), rank, degree)
            found = None if worker is None else (worker.worker, worker.first_rank, worker.degree)
            if found != expected:
                raise ValueError("workers: they are not those of the composition")
            rank += degree
        return self


@event("epoch-aborted", channel=Channel.CONTROL, senders=("controller",))
class EpochAborted(EventData):
    """The reconfiguration did not happen; the old workers are schedulable again."""

    node: NodeId
    epoch: int
    step: Literal["planned", "draining", "switching", "reconciling"]
    reason: str


@event("calibration-updated", channel=Channel.CONTROL, senders=("controller",))
class CalibrationUpdated(EventData):
    """New coefficients, and what justifies them: of so many prefills in the log up to `to_seq`, the mean relative error of the
    set before, and of the new one on shapes that its fit had not seen. `to_seq` 0: it does not say."""

    coefficients: dict[str, float | str]
    samples: int
    error_before: float
    error_after: float
    to_seq: int = 0


@event("parameters-changed", channel=Channel.CONTROL, senders=("controller",))
class ParametersChanged(EventData):
    """Parameter set number `parameters_version` holds from here on: only the changed values are named."""

    parameters_version: int
    changes: dict[str, Any]
    asked_by: str
    reason: str = ""


@event("frozen", channel=Channel.CONTROL, senders=("controller",))
class Frozen(EventData):
    """No reconfiguration, no replication, placement by least work, until `thawed`."""

    asked_by: str
    reason: str = ""


@event("thawed", channel=Channel.CONTROL, senders=("controller",))
class Thawed(EventData):
    """The freeze has ended."""

    asked_by: str
    reason: str = ""


@event("cordoned", channel=Channel.CONTROL, senders=("controller",))
class Cordoned(EventData):
    """Nothing new is placed on this node."""

    node: NodeId
    asked_by: str
    reason: str = ""


@event("uncordoned", channel=Channel.CONTROL, senders=("controller",))
class Uncordoned(EventData):
    """The node takes work again."""

    node: NodeId
    asked_by: str
    reason: str = ""


@event("composition-pinned", channel=Channel.CONTROL, senders=("controller",))
class CompositionPinned(EventData):
    """No policy changes this node's composition any more; operators still may."""

    node: NodeId
    asked_by: str
    reason: str = ""


@event("composition-unpinned", channel=Channel.CONTROL, senders=("controller",))
class CompositionUnpinned(EventData):
    """Policies may change the node's composition again."""

    node: NodeId
    asked_by: str
    reason: str = ""
