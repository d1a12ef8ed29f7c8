"""`vertumnus explain`: why a request went where it went."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands.events import EXIT_FAILED, Json, run

if TYPE_CHECKING:
    from replay.explaining import Attempt, Explanation
    from shared.contracts.envelope import EventData


def explain(
    request: Annotated[str, typer.Argument(help="its id as the answer told it (chatcmpl-…), or its x-request-id")],
    every: Annotated[
        bool | None,
        typer.Option(
            "--all/--recorded", help="recompute what was not recorded, or do not [default: recompute if that is quick]"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Why a request went where it went, and what came of it.

    Every worker that could have had the request, with each part of its price; why others could not; what was predicted and
    what was measured; what happened then. Exit status 1 if the record does not know the request.
    """
    from cli.events.printing import progress
    from cli.whereabouts import database_url
    from replay.explaining import Unknown
    from replay.explaining import explain as explain_request

    url = database_url()
    try:
        with progress("events folded") as told:
            found = run(lambda: explain_request(url, request, recompute=every, progress=told))
    except Unknown as unknown:
        typer.echo(str(unknown), err=True)
        raise typer.Exit(EXIT_FAILED) from unknown
    if json:
        import orjson

        print(orjson.dumps(_document(found)).decode())
        return
    from cli.record.telling import tell
    from cli.terminal import output

    tell(output(), found)


def _document(found: "Explanation") -> dict[str, Any]:
    return {
        "request": found.request,
        "log": found.log,
        "received": found.received.data.model_dump(mode="json", exclude={"block_ids"}) if found.received else None,
        "attempts": [_attempt(each) for each in found.attempts],
        "end": {"type": found.end.event.type, **found.end.data.model_dump(mode="json")} if found.end else None,
        "notes": found.notes,
        "events": [{"stream_seq": each.stream_seq, **each.event.model_dump(mode="json")} for each in found.events],
    }


def _attempt(each: "Attempt") -> dict[str, Any]:
    happened: dict[str, EventData | None] = {
        "started": each.started,
        "completed": each.completed,
        "aborted": each.aborted,
    }
    happened |= {"handed_off": each.handed_off, "redirected": each.redirected}
    weighed = each.weighed
    return {
        "stream_seq": each.stored.stream_seq,
        "assigned": each.assigned.model_dump(mode="json"),
        "recorded_all": each.recorded_all,
        "candidates": [one.model_dump(mode="json") for one in weighed.candidates] if weighed else None,
        "excluded_workers": weighed.excluded if weighed else None,
        **{name: data.model_dump(mode="json") if data else None for name, data in happened.items()},
    }
