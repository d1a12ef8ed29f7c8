"""Which folded states stay in the record."""

from services.ledger import states
from services.ledger.patches import Place
from tests.services.ledger.record_writer import RecordWriter


async def test_the_newest_stay_and_that_with_which_a_part_begins(writer: RecordWriter) -> None:
    await writer.connection.execute("INSERT INTO beginnings VALUES (1, 10, '', '', '', '')")
    places = [10 * (1 + each) for each in range(states.KEPT_MAX + 3)]
    for seq in places:
        await states.keep(writer.connection, Place(1, seq), b"folded")
    assert await states.places(writer.connection, 1) == [10, *places[-states.KEPT_MAX :]]
