"""What the ledger says of the log itself."""

from pydantic import Field

from shared.contracts.envelope import Channel, EventData, event


@event("log-reset", channel=Channel.LEDGER, senders=("ledger",))
class LogReset(EventData):
    """The stream was lost or recreated: a new log begins after `old_last_seq` of the old one."""

    old_log: str
    new_log: str
    old_last_seq: int


@event("log-sealed", channel=Channel.LEDGER, senders=("ledger",))
class LogSealed(EventData):
    """The chained record is complete up to `to_seq`, and its head hash is this."""

    sealed_log: str
    from_seq: int = Field(ge=1)
    to_seq: int
    count: int
    head: bytes
