"""``hangwatch env``: what makes dumps possible, for before the engine starts."""

from __future__ import annotations

import contextlib
import json
import os
import stat

import click

from hangwatch.errors import UsageError

SCHEMA = "hangwatch.env/1"


@click.command(name="env", short_help="The exports that make dumps possible, before a start.")
@click.option(
    "--dir",
    "folder",
    metavar="DIR",
    help="Where named pipes and dumps shall lie, as the engine sees it  "
    "[default: /tmp/hangwatch-UID; with --k8s /tmp]",
)
@click.option(
    "--gpu-core",
    is_flag=True,
    help="GPU core dumps too; no debugger can be attached to the GPU then.",
)
@click.option("--k8s", is_flag=True, help="Print YAML for env of a container.")
@click.option("--explain", is_flag=True, help="Say what each variable gives and costs.")
@click.option("--json", "as_json", is_flag=True, help="Print the variables as JSON.")
def command(folder: str | None, gpu_core: bool, k8s: bool, explain: bool, as_json: bool) -> None:
    """Print the exports that make dumps of an engine possible; to be read before it starts.

    \b
    eval "$(hangwatch env)"
    lmdeploy serve api_server ...

    They change nothing that an engine computes. Under Ray they must be set before `ray start`,
    because workers inherit them from there. A hang is then asked for its dumps by request only:
    --collect flight_recorder, and --collect gpu_core for an engine that is to be restarted anyway.
    """  # noqa: D301  # click's mark for lines to keep
    from hangwatch.core import preparation

    if sum((k8s, explain, as_json)) > 1:
        raise UsageError("--k8s, --explain and --json are different ways to say it: choose one")
    place = _folder(folder, k8s=k8s)
    found = preparation.variables(place, gpu_core=gpu_core)
    if as_json:
        rows = [
            {"name": v.name, "value": v.value, "gives": v.gives, "costs": v.costs} for v in found
        ]
        click.echo(json.dumps({"schema": SCHEMA, "dir": place, "variables": rows}, indent=1))
    elif k8s:
        click.echo(preparation.as_kubernetes(found))
        click.echo(
            f"note: {place} must be there in the container, and writable: PyTorch ends a process "
            "whose named pipe it cannot make",
            err=True,
        )
    elif explain:
        for each in found:
            click.echo(f"{each.name}={each.value}\n  gives: {each.gives}\n  costs: {each.costs}")
    else:
        click.echo(preparation.as_shell(found, place))


def _folder(given: str | None, *, k8s: bool) -> str:
    """Return the folder that is meant.

    Raises:
        UsageError: It is no place for what an engine writes.
    """
    # The container has a /tmp of its own; here everybody has the same.
    place = given or ("/tmp" if k8s else f"/tmp/hangwatch-{os.getuid()}")  # noqa: S108
    if not place.startswith("/"):
        raise UsageError(f"--dir {place}: the engine may start elsewhere; give the whole path")
    place = place.rstrip("/") or "/"
    if given is None and not k8s:
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(place)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise UsageError(f"{place} is not ours: choose another folder with --dir")
    return place
