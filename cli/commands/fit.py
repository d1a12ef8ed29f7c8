"""`vertumnus fit`: a profile in, coefficients out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from shared.model.fitting import Fit

FormName = Literal["paper", "with-g", "better"]


def fit(
    file: Annotated[Path, typer.Argument(metavar="PROFILE", dir_okay=False, help="What `vertumnus profile` wrote")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", dir_okay=False, help="The coefficients, as services load them")
    ] = None,
    form: Annotated[
        FormName, typer.Option(help="Which form to write; `better` has the smaller error on points it has not seen")
    ] = "better",
    name: Annotated[str | None, typer.Option(help="Begins the version that events name [model and device]")] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="A picture, PNG or SVG by its name's ending")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The coefficients on standard output, nothing else")] = False,
) -> None:
    """Fit the cost model to a profile in both forms, the paper's and the one with g(C-1), and compare them."""
    from rich.console import Console

    from cli.files import whole
    from cli.invocation import command
    from cli.profiling.asking import refusals, write_json
    from cli.profiling.document import read_profile
    from cli.profiling.picture import fits_picture
    from cli.profiling.sets import fitted_set
    from cli.terminal import output
    from shared.model.fitting import FORMS, doubts
    from shared.model.fitting import fit as fit_samples

    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    with refusals("fit", errors):
        if out is not None and out.exists() and out.samefile(file):
            raise ValueError(f"--out {out}: is the profile itself, which took long to measure; name another file")
        profile = read_profile(file)
        fits = [fit_samples(profile.samples, each) for each in FORMS]
        chosen, other = _chosen(fits, form)
        found = fitted_set(profile, chosen, other, name)
        if plot is not None:
            from cli.profiling.plotting import plot as draw

            draw(plot, profile.samples, chosen, other, f"{profile.model}, {profile.engine} engine, {profile.machine}")
        if out is not None:
            with whole(out) as opened:
                write_json(found, opened)
    if as_json:
        print(found.model_dump_json())
        return
    output().print(fits_picture(profile.samples, fits, chosen))
    if profile.device == "modelled":
        errors.print(
            "the profile is of a cost model: this shows the method and says nothing of a machine", style="yellow"
        )
    for doubt in doubts(profile.samples):
        errors.print(doubt, style="yellow")
    if out is not None:
        errors.print(f"{out}: {found.version}, form {chosen.form}")
        errors.print(f"next: VERTUMNUS_COEFFICIENTS={out.resolve()} {command()} up")


def _chosen(fits: "list[Fit]", form: FormName) -> "tuple[Fit, Fit]":
    """The one to write, and the other."""
    paper, ours = fits
    if form == "better":
        paper_error, our_error = ((each.held_out or each.errors).mape for each in (paper, ours))
        form = "paper" if paper_error <= our_error else "with-g"
    return (paper, ours) if form == "paper" else (ours, paper)
