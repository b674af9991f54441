"""Write the table of what is tested on which library into its page, from the tests that there are.

With ``--check`` it writes nothing, and says whether the table on the page is that of the tests.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "gradscale" / "TESTED.md"
TABLE = re.compile(r"(?<=<!-- made by .ci/docs/tested.py -->\n)(\|.*\n)*")
sys.path.insert(0, str(ROOT / "tests" / "support"))
from libraries import opened  # noqa: E402

# Of each column: the rows of the fixture ``arrays``, the files of the library's own tests, what those tests are named.
COLUMNS = {
    "NumPy": (["numpy"], "adapters/test_numpy_*.py", ""),
    "torch": (["torch"], "adapters/test_torch_*[!u].py", ""),  # but for those of a GPU
    "torch, meta": ([], "core/test_functions.py", "_meta_"),
    "torch, GPU": ([], "adapters/test_torch_gpu.py", ""),
    "JAX": (["jax"], "adapters/test_jax_*[!u].py", ""),
    "JAX, `jit`": (["jax-jit"], "adapters/test_jax_compiled.py", ""),
    "JAX, GPU": ([], "adapters/test_jax_gpu.py", ""),
    "CuPy, GPU": ([], "adapters/test_cupy_arrays.py", ""),
    "MLX": ([], "adapters/test_mlx_*.py", ""),
    "dask": (["dask"], "", ""),
    "strict": (["strict-2023.12", "strict-2024.12", "strict"], "", ""),
}
# The file whose tests run on the rows of the fixture, and what a test of one library's own has that is of this, too.
FUNCTIONS = {
    "`scale`, `unscale`": ("functions", r"\bunscale\("),
    "`select`": ("functions", r"\bselect\("),
    "`DynamicScale`, `StaticScale`": ("policy", r"\b(Dynamic|Static)Scale\("),
    "`SkipSpikes`": ("spike_rule", r"\bSkipSpikes\("),
    "`GradScaler`": ("settings", r"\bGradScaler\("),
    "closures": ("closures", r"\bclosure\b"),
    "`max_norm=`": ("clipping", r"\bmax_norm="),
    "`StepGuard`": ("bad_steps", r"\bStepGuard\("),
    "`diagnose`": ("diagnosis", r"\bdiagnose\("),
    "`diagnose(state=)`": ("diagnosis", r"\bdiagnose\(.*\b(params|state)="),
    "`state_dict`": ("foreign_state", r"\bstate_dict\("),
    "`load_foreign_state`": ("foreign_state", r"\bload_foreign_state\("),
}
DTYPES = ("float16", "bfloat16", "float64", "complex64")
COMPILED = "compiled"
COMPILES = re.compile(r"jax\.jit\b|torch\.compile\(|mx\.compile\b|cuda\.graph\(|\bcapture\(stream\)")


def collected() -> str:
    """Return the ids of the tests that run on the rows of the fixture."""
    files = {f"tests/core/test_{name}.py" for name, _ in FUNCTIONS.values()}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--collect-only", "--tier", "all", *sorted(files)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def source(files: str, name: str) -> str:
    """Return the code of a library's own tests, of those whose names hold a word if there is one."""
    found = [path.read_text() for path in sorted((ROOT / "tests").glob(files))] if files else []
    if not name:
        return "\n".join(found)
    parts = [part for text in found for part in ast.parse(text).body]
    return "\n".join(ast.unparse(part) for part in parts if name in getattr(part, "name", ""))


def column(ids: str, rows: list[str], files: str, name: str) -> set[str]:
    """Return what is tested in a column, on each of its rows."""
    own = source(files, name)
    found = {dtype for dtype in DTYPES if re.search(rf"\b{dtype}\b", own)}
    if COMPILES.search(own):
        found.add(COMPILED)
    if not rows:
        return found | {text for text, (_, used) in FUNCTIONS.items() if re.search(used, own)}
    for row in rows:
        with opened(row) as library:
            found |= {*library.reals, "complex64"}  # in test_functions.py
    cases = [rf"::\w+\[{row}(-(?!\d{{4}}\.)|\])" for row in rows]
    for text, (file, _) in FUNCTIONS.items():
        if all(re.search(rf"^tests/core/test_{file}\.py{case}", ids, flags=re.MULTILINE) for case in cases):
            found.add(text)
    return found


def table() -> str:
    """Return the table of the tests that pytest collects."""
    ids = collected()
    found = {label: column(ids, *where) for label, where in COLUMNS.items()}
    lines = [["tests of", *found], ["---", *[":-:"] * len(found)]]
    lines += [[text, *("✓" * (text in each) for each in found.values())] for text in (*FUNCTIONS, COMPILED, *DTYPES)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    written = PAGE.read_text()
    made = TABLE.sub(table(), written)
    if "--check" in sys.argv:
        sys.exit(None if made == written else f"{PAGE.name} has another table: python .ci/docs/tested.py")
    PAGE.write_text(made)
