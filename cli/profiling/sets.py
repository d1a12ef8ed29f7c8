"""A set of coefficients as a file that services load: the numbers they read, and the evidence, which they pass over.

Its version, which events name, ends in a digest of the numbers: other numbers cannot have the same name.
"""

import re
from hashlib import blake2b

import orjson
from pydantic import BaseModel, ConfigDict, Field

from cli.profiling.document import Profile
from shared.contracts.geometry import Degree
from shared.model.capacity import Share
from shared.model.cost import Coefficients, read_set
from shared.model.fitting import Errors, Fit

DIGEST_BYTES = 4


class CoefficientSet(BaseModel):
    """Read by `shared.model.cost` (coefficients) and `shared.model.capacity` (shares). Fields it does not know are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")

    version: str = Field(min_length=1, max_length=200)
    d: float
    a: float
    b: float
    c: float
    alpha: float
    g: float = 0.0
    capacity_shares: dict[Degree, Share] = Field(default_factory=dict)
    provenance: str

    @property
    def coefficients(self) -> Coefficients:
        """Errors: pydantic's, for values out of bounds."""
        return Coefficients.model_validate(self.model_dump())


def fitted_set(profile: Profile, chosen: Fit, other: Fit, name: str | None) -> CoefficientSet:
    """The chosen form, with the errors of both as evidence. `name` begins the version; None makes one up."""
    values = {each: getattr(chosen.coefficients, each) for each in ("d", "a", "b", "c", "alpha", "g")}
    made_up = profile.model if profile.device == profile.model else f"{profile.model}-{profile.device}"
    version = named(name or made_up, values, {})
    repeats = min(len(point.seconds) for point in profile.points)
    evidence = {
        "form": chosen.form,
        "errors": {form.form: _errors(form) for form in (chosen, other)},
        "profile": profile.model_dump(mode="json", exclude={"points"}),
    }
    provenance = (
        f"Fitted to {len(profile.points)} points of {profile.model} ({profile.dtype}) on the {profile.engine} engine, "
        f"{profile.machine}, medians of {repeats}: non-negative least squares on relative error, "
        f"form {chosen.form}, MAPE {chosen.errors.mape:.1%}."
    )
    return CoefficientSet.model_validate({"version": version, **values, "provenance": provenance, "fit": evidence})


def with_capacities(known: CoefficientSet, shares: dict[int, float], evidence: BaseModel) -> CoefficientSet:
    """The same coefficients with the profiled κ_C / H, under a version of its own."""
    values = {each: getattr(known, each) for each in ("d", "a", "b", "c", "alpha", "g")}
    name = re.sub(rf"-[0-9a-f]{{{2 * DIGEST_BYTES}}}$", "", known.version)
    document = {
        **known.model_dump(mode="json"),
        "version": named(name, values, shares),
        "capacity_shares": shares,
        "capacity": evidence.model_dump(mode="json"),
    }
    return CoefficientSet.model_validate(document)


def load_set(name: str) -> CoefficientSet:
    """By name or path, with its evidence. Errors: those of `load_coefficients`."""
    read_set(name, Coefficients)
    return read_set(name, CoefficientSet)


def named(name: str, values: dict[str, float], shares: dict[int, float]) -> str:
    """A version out of a name and the numbers. `name` is brought into the form of the names that ship."""
    content = orjson.dumps([sorted(values.items()), sorted(shares.items())])
    digest = blake2b(content, digest_size=DIGEST_BYTES).hexdigest()
    return f"{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}-{digest}"


def _errors(fit: Fit) -> dict[str, object]:
    def shown(errors: Errors | None) -> dict[str, float] | None:
        return None if errors is None else {"mape": round(errors.mape, 4), "worst": round(errors.worst, 4)}

    return {
        "all": shown(fit.errors),
        "held_out": shown(fit.held_out),
        "by_degree": {str(degree): shown(errors) for degree, errors in fit.by_degree.items()},
    }
