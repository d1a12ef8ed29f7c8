"""What the ledger says of the log itself."""

from pydantic import BaseModel, ConfigDict, Field

from shared.contracts.envelope import Channel, EventData, event


@event("log-reset", channel=Channel.LEDGER, senders=("ledger",))
class LogReset(EventData):
    """The stream was lost or recreated: a new log begins after `old_last_seq` of the old one."""

    old_log: str
    new_log: str
    old_last_seq: int


@event("log-sealed", channel=Channel.LEDGER, senders=("ledger",))
class LogSealed(EventData):
    """The chained record is complete up to `to_seq` with `count` rows from `from_seq` on, and its head hash is this: BLAKE2b
    over the heads of its tables' chains, decisions first, then block events, then repeats. `snapshot` is the hash of the state
    that was kept with it: a part of the record that begins here is believed by it."""

    sealed_log: str
    from_seq: int = Field(ge=1)
    to_seq: int
    count: int
    head: bytes
    snapshot: bytes | None = None


class DroppedRun(BaseModel):
    """Consecutive rows of `block_events` that are to go: `rows` of them from `from_seq` to `to_seq`, and the chain's head
    behind the last, from which the chain goes on."""

    model_config = ConfigDict(frozen=True, extra="allow", ser_json_bytes="base64", val_json_bytes="base64")

    log: str
    from_seq: int = Field(ge=1)
    to_seq: int
    rows: int = Field(ge=1)
    chain: bytes


@event("block-day-dropped", channel=Channel.LEDGER, senders=("ledger",))
class BlockDayDropped(EventData):
    """The block events of one UTC day (`2026-11-30`) are dropped as a whole, by policy: said before it is done. All of them
    were sealed."""

    day: str
    kept_days: int = Field(ge=1)
    runs: tuple[DroppedRun, ...]
