"""`vertumnus reconfigure`, `drain`, `pin`, …: what operators ask of the controller. Each is an event with a name to it."""

import getpass
from typing import Annotated, Any

import typer

from cli.whereabouts import EXIT_REFUSED, operator_access

LIMIT_S = 10.0
"""The controller answers within 5 s or says that it cannot."""

Node = Annotated[str, typer.Argument(help="the node's id, as `vertumnus status` shows it")]
Reason = Annotated[str, typer.Option("--reason", help="why, for the record", show_default=False)]
By = Annotated[str | None, typer.Option("--by", help="who asks [the user's name]", show_default=False)]


def reconfigure(
    node: Node,
    composition: Annotated[str, typer.Argument(help="its workers' degrees from rank 0 up, such as 1,1,2,4")],
    reason: Reason = "",
    by: By = None,
) -> None:
    """Move a node to another composition: drained, switched, reconciled, committed or aborted, and all of it on the log."""
    from shared.model.lattice import parse_composition

    try:
        degrees = parse_composition(composition)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="COMPOSITION") from error
    ask("reconfigure", reason, by, node=node, composition=degrees)


def drain(node: Node, reason: Reason = "", by: By = None) -> None:
    """Cordon a node, have what is queued there placed elsewhere, and let what runs end. `uncordon` takes it back."""
    ask("drain", reason, by, node=node)


def pin(node: Node, reason: Reason = "", by: By = None) -> None:
    """Let no policy change this node's composition."""
    ask("pin", reason, by, node=node)


def unpin(node: Node, reason: Reason = "", by: By = None) -> None:
    """Let policies change the node's composition again."""
    ask("unpin", reason, by, node=node)


def cordon(node: Node, reason: Reason = "", by: By = None) -> None:
    """Place nothing new on a node."""
    ask("cordon", reason, by, node=node)


def uncordon(node: Node, reason: Reason = "", by: By = None) -> None:
    """Place on the node again."""
    ask("uncordon", reason, by, node=node)


def freeze(reason: Reason = "", by: By = None) -> None:
    """No reconfiguration and no replication, and placement by least work, until `thaw`."""
    ask("freeze", reason, by)


def thaw(reason: Reason = "", by: By = None) -> None:
    """End the freeze."""
    ask("thaw", reason, by)


def ask(command: str, reason: str, by: str | None, **about: Any) -> None:
    """Have the controller do it, and print what it has recorded. Ends the command if it does not."""
    body = {"asked_by": by or getpass.getuser(), "reason": reason, **about}
    said = request("POST", command, body)
    typer.echo(", ".join(said["events"]) or "that holds already")


def request(method: str, command: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the controller answers. Ends the command with its words if it refuses."""
    import httpx

    url, key = operator_access()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(method, f"{url}/v1/operator/{command}", json=body, headers=headers, timeout=LIMIT_S)
    except httpx.HTTPError as error:
        typer.echo(f"the controller at {url} does not answer: {error or type(error).__name__}", err=True)
        raise typer.Exit(EXIT_REFUSED) from error
    said = answer.json() if answer.headers.get("content-type") == "application/json" else {}
    if answer.is_error:
        typer.echo(f"{command}: {said.get('detail', answer.text[:200])}", err=True)
        raise typer.Exit(EXIT_REFUSED)
    return dict(said)
