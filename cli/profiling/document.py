"""A profile as a file: what was measured, of which model, on what, by which code. Versioned; other versions are refused."""

from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from shared.contracts.geometry import Degree
from shared.model.fitting import SAMPLES_MAX, Sample

PROFILE_VERSION = 1
PROFILE_BYTES_MAX = 64 * 2**20

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class BadProfile(ValueError):
    """A file that is no profile. The message names the file, the field and its limit."""


class Circumstances(BaseModel):
    """What every measurement of an engine says of where it was made."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    made_at: datetime
    code: str
    """Version of the code that measured."""
    engine: str
    model: str
    model_revision: str
    device: str
    machine: str


class Point(BaseModel):
    """One shape of prefill at one degree: R uncached tokens after P cached ones, seconds of each repeat."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    degree: Degree
    uncached_tokens: int = Field(ge=1)
    cached_tokens: int = Field(ge=0)
    seconds: tuple[Seconds, ...] = Field(min_length=1, max_length=1_000)

    @property
    def prompt_tokens(self) -> int:
        return self.uncached_tokens + self.cached_tokens

    @property
    def sample(self) -> Sample:
        """With the median of the repeats: one of them that was disturbed moves nothing."""
        return Sample(self.degree, self.uncached_tokens, self.cached_tokens, median(self.seconds))


class Profile(Circumstances):
    """`warmups` prefills came before each point's repeats and are not in it. `device` is `modelled` where a cost model
    stood for the engine: such a profile proves the method and nothing about a machine."""

    kind: Literal["vertumnus-profile"] = "vertumnus-profile"
    version: int = PROFILE_VERSION
    dtype: str
    block_tokens: int = Field(ge=1)
    degrees: tuple[Degree, ...]
    warmups: int = Field(ge=0)
    points: tuple[Point, ...] = Field(min_length=1, max_length=SAMPLES_MAX)

    @field_validator("version", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if value != PROFILE_VERSION:
            raise ValueError(f"profile version {str(value)[:40]} is unknown; this code reads version {PROFILE_VERSION}")
        return value

    @property
    def samples(self) -> list[Sample]:
        """What a fit wants."""
        return [point.sample for point in self.points]


def read_profile(path: Path) -> Profile:
    """Errors: BadProfile; OSError when the file cannot be read."""
    with path.open("rb") as file:
        raw = file.read(PROFILE_BYTES_MAX + 1)
    if len(raw) > PROFILE_BYTES_MAX:
        raise BadProfile(f"{path}: more than {PROFILE_BYTES_MAX} bytes")
    try:
        return Profile.model_validate_json(raw)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        # A file of another version may break any field; its version is the reason.
        first = next((each for each in found if each["loc"] == ("version",)), found[0])
        field = ".".join(map(str, first["loc"])) or "content"
        raise BadProfile(f"{path}: {field}: {first['msg'].removeprefix('Value error, ')}") from None
