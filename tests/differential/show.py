"""Prints the record of one script, or what differs between the two roots.

PYTHONPATH=src:tests python -m differential.show hook_order_fit lightning.pytorch
PYTHONPATH=src:tests python -m differential.show hook_order_fit            # differences only
"""

import json
import sys
import tempfile
from pathlib import Path

from differential.compare import report
from differential.harness import OTHER, REFERENCE, SCRIPTS, compare_roots, load_root, run_script
from differential.scripts import load_all


def main() -> None:
    load_all()
    if len(sys.argv) < 2 or sys.argv[1] not in SCRIPTS:
        sys.exit(f"{__doc__}\nscripts: {' '.join(SCRIPTS)}")
    name, *roots = sys.argv[1:]
    function = SCRIPTS[name].function
    with tempfile.TemporaryDirectory() as folder:
        records = [
            run_script(function, load_root(root), Path(folder) / str(number))
            for number, root in enumerate(roots or [REFERENCE, OTHER])
        ]
    if len(records) == 2:
        print(report(name, compare_roots(*records), limit=1000))
        return
    print("\n".join(records[0].trace))
    print(json.dumps(records[0].facts, indent=1))


if __name__ == "__main__":
    main()
