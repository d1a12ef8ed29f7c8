"""The `vertumnus` command. One module per verb in `cli.commands`; this list is all there is."""

import typer

from cli.commands import (
    calibrate_cache,
    capacity,
    demo,
    doctor,
    events,
    explain,
    fit,
    ledger,
    operate,
    params,
    plan,
    profile,
    replay,
    simulate,
    status,
    trace,
    up,
    verify,
    what_if,
)

app = typer.Typer(
    name="vertumnus",
    help="Adaptive context parallelism for LLM prefill serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("up")(up.up)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("status")(status.status)
app.command("explain")(explain.explain)
app.command("replay")(replay.replay)
app.command("verify")(verify.verify)
app.command("profile")(profile.profile)
app.command("fit")(fit.fit)
app.command("capacity")(capacity.capacity)
app.command("plan")(plan.plan)
app.command("what-if")(what_if.what_if)
app.command("calibrate-cache")(calibrate_cache.calibrate_cache)
app.command("simulate")(simulate.simulate)
for command in (
    operate.reconfigure,
    operate.drain,
    operate.pin,
    operate.unpin,
    operate.cordon,
    operate.uncordon,
    operate.freeze,
    operate.thaw,
):
    app.command()(command)
app.add_typer(params.app, name="params")
app.add_typer(trace.app, name="trace")
app.add_typer(events.app, name="events")
app.add_typer(ledger.app, name="ledger")
