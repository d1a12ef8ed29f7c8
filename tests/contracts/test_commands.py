"""What travels unlogged fits into a message, whatever a client asks for."""

from uuid import UUID

from shared.contracts.commands import (
    JSON_SCHEMA_CHARS_MAX,
    LOGIT_BIAS_MAX,
    PROMPT_BLOCKS_MAX,
    STOP_TOKENS_MAX,
    Assign,
    SamplingSpec,
    encode_message,
)
from shared.contracts.ids import BLOCK_ID_BYTES, RequestId, RouterId, Source, WorkerId
from shared.contracts.message import TEXT_CHARS_MAX
from shared.runtime.server_checks import PAYLOAD_BYTES_MIN


def test_the_largest_assignment_fits_into_a_message() -> None:
    """Every field at its limit that has one worth naming, and in the schema nothing but characters that take two."""
    token, number, name, worker = 2**32 - 1, 2**63 - 1, "x" * 200, WorkerId("n0/1/0")
    sampling = SamplingSpec(
        temperature=1 / 3,
        top_p=1 / 3,
        min_p=1 / 3,
        presence_penalty=-1 / 3,
        frequency_penalty=-1 / 3,
        repetition_penalty=1 / 3,
        seed=-(2**63),
        logit_bias={token - number: -100 / 3 for number in range(LOGIT_BIAS_MAX)},
        min_tokens=number,
        json_schema='"' * JSON_SCHEMA_CHARS_MAX,
    )
    assign = Assign(
        request=RequestId("x" * 64),
        attempt=2**31 - 1,
        router=RouterId(name),
        router_source=Source(name),
        worker=worker,
        decode_worker=worker,
        prompt_tokens=number,
        block_ids=b"\xff" * (PROMPT_BLOCKS_MAX * BLOCK_ID_BYTES),
        max_new_tokens=number,
        stop_tokens=(token,) * STOP_TOKENS_MAX,
        sampling=sampling,
        service_us=number,
        decision=UUID(int=0),
        traceparent="x" * TEXT_CHARS_MAX,
        fetch_from=worker,
        fetch_blocks=number,
        rebalanced=True,
        generated_tokens=number,
    )
    assert len(encode_message(assign)) < PAYLOAD_BYTES_MIN
