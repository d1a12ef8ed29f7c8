"""Streams that every service makes at its start, whoever comes first."""

import nats.js.errors
from nats.js.api import StreamConfig, StreamInfo

from shared.runtime.clock import Clock
from shared.runtime.nats_link import NatsLink

LOOKS = 20
LOOK_EVERY_S = 0.1
"""How long a stream that another service is making may take to appear: 2 s."""

_NAME_IN_USE = 10058
_NO_ROOM = 10047


async def create_or_find(link: NatsLink, wanted: StreamConfig, clock: Clock, limit_s: float) -> StreamInfo:
    """The stream of `wanted`'s name as it is, made as `wanted` if there is none. `limit_s` is for each call.

    Of those who create one stream at once, one wins. The others hear that the name is taken, or, since the server sets
    `max_bytes` aside for each of them until it has found that out, that there is no room (measured on NATS 2.15.1).

    Errors: those of the client; the last refusal if there is still no stream after `LOOKS`.
    """
    js = link.client.jetstream(timeout=limit_s)
    assert wanted.name is not None
    refusal: nats.js.errors.APIError | None = None
    for _ in range(LOOKS):
        try:
            return await js.stream_info(wanted.name)
        except nats.js.errors.NotFoundError:
            pass
        try:
            return await js.add_stream(wanted)
        except nats.js.errors.APIError as error:
            if error.err_code not in {_NAME_IN_USE, _NO_ROOM}:
                raise
            refusal = error
        await clock.sleep(LOOK_EVERY_S)
    assert refusal is not None
    raise refusal
