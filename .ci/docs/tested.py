"""Write the table of what is tested on which library into the guide, from the tests that there are.

With ``--check`` it writes nothing, and says whether the table in the guide is that of the tests.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "gradscale" / "README.md"
TABLE = re.compile(r"(?<=<!-- made by .ci/docs/tested.py -->\n)(\|.*\n)*")
# By the row of the fixture ``arrays``, by which the name of each test's case begins.
LIBRARIES = {"numpy": "NumPy", "strict": "array-api-strict", "torch": "torch", "dask": "dask", "jax": "JAX"}
LIBRARIES |= {"jax-jit": "JAX in `jit`"}
# By the file of the tests that it has.
FUNCTIONS = {
    "functions": "`scale`, `unscale`, `select`",
    "policy": "`DynamicScale`, `StaticScale`",
    "spike_rule": "`SkipSpikes`",
    "scaler": "`GradScaler`",
    "closures": "closures",
    "clipping": "`max_norm=`",
    "guard": "`StepGuard`",
    "diagnosis": "`diagnose`",
    "diagnosis_broken": "`diagnose(params=, state=)`",
    "checkpoint": "`state_dict`",
    "foreign_state": "`load_foreign_state`",
}


def table() -> str:
    """Return the table of the tests that pytest collects."""
    files = [f"tests/core/test_{name}.py" for name in FUNCTIONS]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--collect-only", "--tier", "all", *files]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rows = "|".join(sorted(LIBRARIES, key=len, reverse=True))
    found = set(re.findall(rf"^tests/core/test_(\w+)\.py::\w+\[({rows})(?:-|\])", listed, flags=re.MULTILINE))
    lines = [["tests of", *LIBRARIES.values()], ["---", *[":-:"] * len(LIBRARIES)]]
    lines += [[text, *("✓" * ((name, row) in found) for row in LIBRARIES)] for name, text in FUNCTIONS.items()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    written = GUIDE.read_text()
    made = TABLE.sub(table(), written)
    if "--check" in sys.argv:
        sys.exit(None if made == written else f"{GUIDE.name} has another table: python .ci/docs/tested.py")
    GUIDE.write_text(made)
