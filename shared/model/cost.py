"""E_C(R, P): how long a prefill takes (paper, section 3.3, with one term added).

    E_C(R, P) = d + aR + bP + g(C-1) + (cR + αW(R, P)) / C        W(R, P) = R·P + R(R+1)/2

R uncached tokens, P cached tokens, C ranks. `g` is ours: without it the cost always falls with C, and the model cannot
say that context parallelism makes short prefills slower. On a public 12-point set it lowers the fit's error from 8.9 % to
1.6 % MAPE. Decisions compare whole microseconds, so every machine decides alike.
"""

from importlib import resources
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from shared.contracts.envelope import Stored
from shared.contracts.events import CalibrationUpdated
from shared.model.set_version import check_version

US_PER_S = 1_000_000

PREFILL_US_MAX = 1 << 40
"""No prefill is predicted to take longer than 12 days, so that whatever is made of predictions fits into 64 bits."""

SET_BYTES_MAX = 1 << 20
"""A set with all the evidence for it takes a few tens of kilobytes; a larger file is something else."""

FIRST_CHARS_MAX, SEQ_CHARS_MAX = 180, 18
"""Of a fitted set's version, which has 200 at most: what comes before the plus, and the sequence, which fits into 64 bits."""

_Form = TypeVar("_Form", bound=BaseModel)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def attended_pairs(uncached_tokens: int, cached_tokens: int) -> int:
    """W(R, P): query-key pairs that causal attention computes for R new tokens after P cached ones."""
    return uncached_tokens * cached_tokens + uncached_tokens * (uncached_tokens + 1) // 2


class Coefficients(BaseModel):
    """One fitted set, for one model on one kind of GPU. Seconds and tokens; each coefficient is at least 0.

    The limits are far beyond any machine. They keep a slip of the decimal point from overflowing what is added up.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: str = Field(min_length=1, max_length=200)
    d: float = Field(ge=0, le=3_600)
    a: float = Field(ge=0, le=3_600)
    b: float = Field(ge=0, le=3_600)
    c: float = Field(ge=0, le=3_600)
    alpha: float = Field(ge=0, le=3_600)
    g: float = Field(default=0.0, ge=0, le=3_600)

    def prefill_us(self, degree: int, uncached_tokens: int, cached_tokens: int) -> int:
        """E_C(R, P) in microseconds, for a request that has its step to itself."""
        R, P = uncached_tokens, cached_tokens
        shared = self.d + self.a * R + self.b * P + self.g * (degree - 1)
        divided = self.c * R + self.alpha * attended_pairs(R, P)
        return min(round((shared + divided / degree) * US_PER_S), PREFILL_US_MAX)

    def prefills_us(self, degree: Floats, uncached_tokens: Floats, cached_tokens: Floats) -> Ints:
        """Many of them at once, each exactly as `prefill_us` says: by the same operations in the same order, on whole numbers
        that floats hold exactly, for prompts of less than 2^26 tokens. Any shapes that broadcast, in that of the result."""
        R, P = uncached_tokens, cached_tokens
        pairs = R * (R + (P + P + 1)) / 2
        shared = self.d + self.a * R + self.b * P + self.g * (degree - 1)
        divided = self.c * R + self.alpha * pairs
        return np.minimum(np.rint((shared + divided / degree) * US_PER_S), PREFILL_US_MAX).astype(np.int64)

    @property
    def numbers(self) -> tuple[float, float, float, float, float, float]:
        """For compiled code, which reads no models."""
        return self.d, self.a, self.b, self.c, self.alpha, self.g

    def constant_us(self, degree: int) -> int:
        """d + g(C-1): what a step costs whatever is in it."""
        return self.prefill_us(degree, 0, 0)

    def adds_us(self, degree: int, uncached_tokens: int, cached_tokens: int) -> int:
        """What a request adds to a step: E_C(R, P) without the step's constant."""
        return self.prefill_us(degree, uncached_tokens, cached_tokens) - self.constant_us(degree)

    def slo_us(self, prompt_tokens: int) -> int:
        """τ for a request that names no SLO: 0.5 s + 3·E_4(L, 0)."""
        return US_PER_S // 2 + 3 * self.prefill_us(4, prompt_tokens, 0)

    def scaled(self, factor: float) -> "Coefficients":
        """The same set with every second multiplied by `factor`; its version says so."""
        if factor == 1:
            return self
        scaled = {name: getattr(self, name) * factor for name in ("d", "a", "b", "c", "alpha", "g")}
        return Coefficients(version=f"{self.version}*{factor:g}", **scaled)


def refit_of(version: str, seq: int) -> str:
    """What a set is called that was fitted to the log up to `seq`, while `version` priced."""
    return f"{first_version(version)[:FIRST_CHARS_MAX]}+{seq}"


def is_refit(version: str, of: str) -> bool:
    """Whether a set of this version was fitted while `of`, or a fit of the same first set, priced."""
    return refit_seq(version) is not None and first_version(version) == first_version(of)[:FIRST_CHARS_MAX]


def first_version(version: str) -> str:
    """The set that processes were started with, of one that may have been fitted since."""
    return version if refit_seq(version) is None else version.rpartition("+")[0]


def refit_seq(version: str) -> int | None:
    """How far the log went that the set was fitted to; None for one that was not fitted while the pool ran."""
    base, plus, seq = version.rpartition("+")
    return int(seq) if base and plus and seq.isdecimal() and len(seq) <= SEQ_CHARS_MAX else None


def load_coefficients(name: str) -> Coefficients:
    """A set that ships with the project, by its name, or one of your own, by the path of its file, which ends in `.json`.

    Errors: ValueError lists the known names, or names the file with the field and its limit.
    """
    return read_set(name, Coefficients)


def read_set(name: str, form: type[_Form]) -> _Form:
    """One part of a set's document; see `load_coefficients`."""
    raw = _own(Path(name)) if name.endswith(".json") else _shipped(name)
    try:
        read = form.model_validate_json(raw)
        check_version(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "content"
        raise ValueError(f"coefficients: {name}: {field}: {first['msg']}") from None
    except ValueError as error:
        raise ValueError(f"coefficients: {name}: {error}") from None
    return read


def _shipped(name: str) -> bytes:
    folder = resources.files("shared.model") / "coefficients"
    known = sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))
    if name not in known:
        raise ValueError(f"coefficients: {name[:64]!r} is not one of {known}, and no path that ends in .json")
    return (folder / f"{name}.json").read_bytes()


def _own(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(SET_BYTES_MAX + 1)
    except OSError as error:
        raise ValueError(f"coefficients: {str(path)[-200:]} cannot be read: {error.strerror}") from None
    if len(raw) > SET_BYTES_MAX:
        raise ValueError(f"coefficients: {path} has more than {SET_BYTES_MAX} bytes")
    return raw


def _known(name: str) -> str:
    load_coefficients(name)
    return name


CoefficientsName = Annotated[str, AfterValidator(_known)]
"""For settings: a set that ships with the project, or the path of one of your own."""


def read(data: CalibrationUpdated) -> Coefficients | None:
    """The set that is told; None if this version cannot read it."""
    try:
        return Coefficients.model_validate(data.coefficients)
    except ValidationError:
        return None


def evolve(coefficients: Coefficients, stored: Stored) -> Coefficients:
    """Fold one event. A set that this version cannot read changes nothing: a fold goes on. Nor does one that was fitted while
    another set priced than this process was started with: who measured a new set anew is not to get the old one's fit."""
    if not isinstance(stored.data, CalibrationUpdated) or (told := read(stored.data)) is None:
        return coefficients
    return told if refit_seq(told.version) is None or is_refit(told.version, coefficients.version) else coefficients
