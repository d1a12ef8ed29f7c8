"""When the record is sealed again."""

from typing import Any
from uuid import UUID

import pytest

from services.ledger.notary import Notary
from services.ledger.seals import Extent
from services.ledger.settings import LedgerSettings
from shared.runtime.memory import ManualClock

HOUR_NS = 3_600 * 10**9


@pytest.mark.parametrize(
    ("reached", "sealed", "sealed_at", "due"),
    [
        pytest.param(5, 0, 0, True, id="never-sealed"),
        pytest.param(6, 5, 6, False, id="only-the-seal"),
        pytest.param(7, 5, 6, True, id="an-event-after-the-seal"),
        pytest.param(9, 5, 9, True, id="events-while-the-seal-was-on-its-way"),
        pytest.param(8, 5, 9, True, id="the-seal-is-not-copied-yet"),
    ],
)
def test_whatever_no_seal_covers_is_sealed_within_the_hour(
    reached: int, sealed: int, sealed_at: int, due: bool
) -> None:
    clock, settings = ManualClock(), LedgerSettings(database_url="postgresql://nobody@nowhere/x")
    notary: Any = Notary(None, None, settings, clock)  # type: ignore[arg-type]
    sealed_ns = clock.now_ns() - HOUR_NS if sealed else None
    extent = Extent(UUID(int=1), reached, {}, sealed, sealed_at, sealed_ns)
    assert notary._is_due(extent) == due
    if sealed:
        assert not notary._is_due(extent._replace(sealed_ns=sealed_ns + 1)), "the hour is not over"
