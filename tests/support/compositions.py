"""Compositions for Hypothesis."""

from hypothesis import strategies as st

from shared.model.lattice import DEGREES, Composition


@st.composite
def compositions(draw: st.DrawFn, most: int, exactly: bool = False) -> Composition:
    """Compositions of up to `most` units, or of exactly that many."""
    units = most if exactly else draw(st.integers(1, most))
    composition: list[int] = []
    while (used := sum(composition)) < units:
        composition.append(draw(st.sampled_from([d for d in DEGREES if used % d == 0 and used + d <= units])))
    return tuple(composition)
