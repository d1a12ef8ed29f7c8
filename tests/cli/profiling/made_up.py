"""A profile of a machine that is exactly as its coefficients say."""

from datetime import UTC, datetime

from cli.profiling.document import Point, Profile
from shared.model.cost import Coefficients

KNOWN = Coefficients(version="known", d=0.02, a=3e-5, b=2e-6, c=6e-5, alpha=5e-9, g=0.01)
SHAPES = [(R, P) for R in (64, 512, 4_096) for P in (0, 1_024, 8_192)]


def profile_of(coefficients: Coefficients = KNOWN, device: str = "cpu") -> Profile:
    points = tuple(
        Point(degree=C, uncached_tokens=R, cached_tokens=P, seconds=(coefficients.prefill_us(C, R, P) / 1e6,) * 3)
        for R, P in SHAPES
        for C in (1, 2, 4, 8)
    )
    return Profile(
        made_at=datetime(2026, 1, 2, tzinfo=UTC),
        code="0.1.0",
        engine="torch",
        model="Some-Model 1.5B",
        model_revision="r1",
        dtype="bfloat16",
        device=device,
        machine="8 × GPU",
        block_tokens=64,
        degrees=(1, 2, 4, 8),
        warmups=1,
        points=points,
    )
