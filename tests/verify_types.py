"""How much of the public surface has types, as pyright tells its users: ``make lint`` runs this.

python -m tests.verify_types            the share, and an error below it
python -m tests.verify_types --all      with every symbol whose type is unknown or ambiguous
"""

import json
import os
import pathlib
import subprocess
import sys

SHARE = 0.95
COMMAND = [sys.executable, "-m", "pyright", "--verifytypes", "fuel_jax"]


def main() -> str | None:
    """What is missing, or None; the package and its dependencies are this interpreter's."""
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    command = [*COMMAND, "--ignoreexternal", "--outputjson"]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": path})
    try:
        found = json.loads(run.stdout)
    except json.JSONDecodeError:
        return f"{run.stdout}{run.stderr}"
    if "completenessScore" not in (types := found.get("typeCompleteness", {})):
        return run.stdout
    share, symbols = types["completenessScore"], types["symbols"]
    if not symbols:
        return f"pyright found no types: {found['generalDiagnostics']}. Install the package first."
    if share < SHARE or "--all" in sys.argv:
        for symbol in symbols:
            if symbol["isExported"] and not symbol["isTypeKnown"]:
                print(symbol["name"], *(d["message"] for d in symbol["diagnostics"]), sep="\n    ")
    print(f"{share:.1%} of {sum(s['isExported'] for s in symbols)} public symbols have known types")
    return None if share >= SHARE else f"wanted {SHARE:.0%}: annotate what is listed above"


if __name__ == "__main__":
    sys.exit(main())
