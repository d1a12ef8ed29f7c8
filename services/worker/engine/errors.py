"""What an engine refuses or cannot do. Part of `protocol`, which says when."""


class EngineError(Exception):
    """What an engine refuses or cannot do."""


class StaleEpoch(EngineError):
    """The command's epoch is not the one served. Nothing was done."""


class Busy(EngineError):
    """`adopt` while a step runs, or `prefill` on a worker that runs one. Nothing was done; safe to repeat."""


class RolledBack(EngineError):
    """`adopt` did not bring every rank along. All of them serve the old epoch as before; safe to repeat, under any number that
    is above the one served."""


class OutOfBlocks(EngineError):
    """A prompt of the step needs more KV blocks than the worker can free. The step is refused whole and nothing was stored:
    pack fewer requests, or release some. What left to make room before that was noticed is named by the next result.

    `passing`: there will be room once copies and leases have ended, which they do by themselves. Copies to the worker have
    been called off."""

    def __init__(self, message: str, *, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


class Cancelled(EngineError):
    """The request was cancelled while it was handed off or decoded."""


class EngineDied(EngineError):
    """Ranks are gone or hung."""
