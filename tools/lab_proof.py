"""Runs the demo of every fault and prints what was said of it, as a Markdown table.

lab_proof.py [SERVERS [FAULT…]]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

from hangwatch.lab import faults

HEAD = """\
| fault | right | said | cause | right cause | first alarm |
|---|---|---|---|---|---|"""


def row(name: str, servers: str) -> str:
    fault = faults.load(name)
    if reason := fault.unavailable():
        return f"| `{name}` | {' or '.join(fault.verdicts)} | *not here: {reason}* | | | |"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "hangwatch", "demo", name, "--json"),
                *("--servers", servers, "--output", folder),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    if not done.stdout:
        return f"| `{name}` | | *{done.stderr.strip().splitlines()[-1]}* | | | |"
    result = json.loads(done.stdout)
    cause = result.get("cause") or result["instances"][0]["cause"]
    after = f"{result['alarm_s']:.1f} s" if "alarm_s" in result else ""
    right = "yes" if result["caught"] else "**no**"
    named = "yes" if cause == fault.causes[0] else "partly" if cause in fault.causes else "no"
    return f"| `{name}` | {right} | {result['verdict']} | `{cause}` | {named} | {after} |"


def main() -> None:
    servers, *names = (*sys.argv[1:], *([] if sys.argv[1:] else ["8"]))
    print(HEAD)
    for name in names or faults.names():
        print(row(name, servers), flush=True)


if __name__ == "__main__":
    main()
