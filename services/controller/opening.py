"""How a new pool begins: with the first term that anybody takes on its log, what is recommended is set. Pure.

    the log is empty or young, nothing was kept of an older one, nobody has led   →  `parameters-changed`
    anything else                                                                 →  nothing, whatever version reads it

It is stored in one batch with that term, behind the fence: so no pool is opened twice or led unopened, whoever dies and however
many controllers start at once, and there is no worker before it for which anything could have been decided. A pool that an
older version has led keeps the parameters it has (ADR 44).
"""

from services.controller import decider
from services.controller.decider import Asker, State
from shared.contracts.envelope import EventData
from shared.model.parameters import RECOMMENDED

NEW_POOL = Asker("new pool", "what is recommended for new pools")


def opening(state: State, first_seq: int, kept_events: int) -> list[EventData]:
    """What goes with the term that is about to be taken on `state`. The fold began at `first_seq`, with so many kept events."""
    if state.term or first_seq > 1 or kept_events:
        return []
    return decider.change_parameters(state, RECOMMENDED, NEW_POOL)
