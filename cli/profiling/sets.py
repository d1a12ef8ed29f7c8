"""A set of coefficients as a file that services load: the numbers they read, and the evidence, which they pass over.

Its version, which events name, ends in a digest of the numbers (`shared.model.set_version`).
"""

from pydantic import BaseModel, ConfigDict, Field

from cli.profiling.document import Profile
from shared.contracts.geometry import Degree
from shared.model.capacity import Share
from shared.model.cost import Coefficients, read_set
from shared.model.fitting import Errors, Fit
from shared.model.set_version import COEFFICIENTS, name_of, named


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
    values = {each: getattr(chosen.coefficients, each) for each in COEFFICIENTS}
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
    values = {each: getattr(known, each) for each in COEFFICIENTS}
    document = {
        **known.model_dump(mode="json"),
        "version": named(name_of(known.version), values, shares),
        "capacity_shares": shares,
        "capacity": evidence.model_dump(mode="json"),
    }
    return CoefficientSet.model_validate(document)


def load_set(name: str) -> CoefficientSet:
    """By name or path, with its evidence. Errors: those of `load_coefficients`."""
    read_set(name, Coefficients)
    return read_set(name, CoefficientSet)


def _errors(fit: Fit) -> dict[str, object]:
    def shown(errors: Errors | None) -> dict[str, float] | None:
        return None if errors is None else {"mape": round(errors.mape, 4), "worst": round(errors.worst, 4)}

    return {
        "all": shown(fit.errors),
        "held_out": shown(fit.held_out),
        "by_degree": {str(degree): shown(errors) for degree, errors in fit.by_degree.items()},
    }
