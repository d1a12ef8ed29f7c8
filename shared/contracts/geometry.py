"""How a node's ranks may be divided among workers, as far as a message must keep to it (`shared.model.lattice` has the rest).

Every fold walks over ranks: an event that claims two billion of them would end every service that reads it, at every start.
"""

from typing import Annotated

from pydantic import AfterValidator, Field, GetPydanticSchema
from pydantic_core.core_schema import chain_schema, literal_schema

DEGREES = (1, 2, 4, 8)
RANKS_MAX = 64

Rank = Annotated[int, Field(ge=0, lt=RANKS_MAX)]
RankCount = Annotated[int, Field(ge=0, le=RANKS_MAX)]


def check_composition(composition: tuple[int, ...]) -> tuple[int, ...]:
    """`composition`, if its workers fit; ValueError says which one is misaligned or of no known degree."""
    rank = 0
    for degree in composition:
        if degree not in DEGREES:
            raise ValueError(f"composition {composition}: degree {degree} is not one of {DEGREES}")
        if rank % degree:
            raise ValueError(f"composition {composition}: a degree-{degree} worker cannot start at rank {rank}")
        rank += degree
    if not 0 < rank <= RANKS_MAX:
        raise ValueError(f"composition {composition}: {rank} ranks; a node has 1 to {RANKS_MAX}")
    return composition


def _fits(composition: tuple[int, ...]) -> tuple[int, ...]:
    """Says less than `check_composition`: errors of messages do not repeat what was in them."""
    try:
        return check_composition(composition)
    except ValueError:
        raise ValueError("no composition of any node") from None


def _fits_if_any(composition: tuple[int, ...]) -> tuple[int, ...]:
    return _fits(composition) if composition else composition


Degree = Annotated[
    int, GetPydanticSchema(lambda type_, handler: chain_schema([handler(type_), literal_schema(list(DEGREES))]))
]
"""Checked without a call of Python: an assignment has a dozen of them."""

Composition = Annotated[tuple[int, ...], AfterValidator(_fits)]
"""Degrees from rank 0 up. The sum is the number of ranks."""

MaybeComposition = Annotated[tuple[int, ...], AfterValidator(_fits_if_any)]
"""Empty for a node that has none."""
