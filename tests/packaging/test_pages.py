"""The pages: their code runs as it stands, their commands are the ones that are tested, their links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from axes import require, require_program
from worlds import mpi_command, mpi_environment

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", ".github/CONTRIBUTING.md", "gradscale/README.md")),
        *(ROOT / name for name in ("examples/README.md", "examples/README_ADAPTER.md")),
        *(ROOT / name for name in ("tests/README.md", "tests/benchmarks/README.md")),
        *(ROOT / f"backends/gradscale_{name}/README.md" for name in ("numpy", "torch", "jax", "cupy")),
        ROOT / "backends/gradscale_torch/RECIPES.md",
    )
}
README = PAGES["README.md"]
COMMAND = re.compile(r"<!-- command: (\w+) -->\n```sh\n(.*?)```", flags=re.DOTALL)
COMMANDS = {name: (page, line) for page, text in PAGES.items() for name, line in COMMAND.findall(text)}
BLOCK = re.compile(r"<!-- run: ([\w-]+) -->\n```python\n(.*?)```", flags=re.DOTALL)
BLOCKS = [block for text in PAGES.values() for block in BLOCK.findall(text)]
# These take names for granted, and are run by the tests of the adapter that they are for.
RECIPE = re.compile(r"<!-- recipe: \w+ -->\n```python\n")
LARGEST_README = 260  # lines, which are read in three minutes

# What the blocks of the first screen do not say of themselves: that they have learnt.
LEARNT = {
    "numpy-first": "assert abs(optimizer.weights - np.float32([1, -2, 3, -4])).max() < 0.01\n",
    "torch-first": "assert loss.item() < 0.1 and scaler.get_scale() <= 65536\n",
}


def test_every_block_of_python_is_run() -> None:
    names = [name for name, _ in BLOCKS]
    assert len(set(names)) == len(names)
    assert set(names) == {
        *("torch-first", "numpy-first", "mpi", "functional", "single", "adapter", "testing", "torch", "jax"),
        *("reports", "presets", "cupy", "library", "own-adapter", "resume"),
    }
    recipes = sum(len(RECIPE.findall(text)) for text in PAGES.values())
    assert sum(len(re.findall(r"```python", text)) for text in PAGES.values()) == len(BLOCKS) + recipes


def test_every_page_is_looked_at() -> None:
    folders = [ROOT, ROOT / ".github", ROOT / "gradscale", ROOT / "examples", ROOT / "tests", ROOT / "backends"]
    found = {path for folder in folders for path in folder.glob("*.md")}
    found |= {path for folder in folders[2:] for path in folder.glob("*/*.md")}
    assert {path.relative_to(ROOT).as_posix() for path in found} == set(PAGES)


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len(README.splitlines()) <= LARGEST_README


@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param(name, code, marks=pytest.mark.tier("quick" if name == "numpy-first" else "all"), id=name)
        for name, code in BLOCKS
    ],
)
def test_a_block_runs(name: str, code: str, tmp_path: Path) -> None:
    # Not by the name of the library that it imports.
    program = tmp_path / f"block_{name}.py"
    program.write_text(code + LEARNT.get(name, ""))
    command = [sys.executable, str(program)]
    environment = mpi_environment()
    if name in ("torch", "torch-first", "jax"):
        require(name.partition("-")[0])
    if name == "cupy":
        # Not on a GPU, but with the stand-in of the adapter's tests.
        require_program("c++")
        (tmp_path / "sitecustomize.py").write_text("import host_cupy\nkept = host_cupy.installed()\nkept.__enter__()\n")
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(tmp_path), str(ROOT / "tests" / "support"), environment.get("PYTHONPATH")))
        )
    if name in ("mpi", "resume"):
        require("mpi")
        command = mpi_command(2, program)
    completed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=90, check=False, cwd=tmp_path
    )
    assert completed.returncode == 0, completed.stderr
    if name == "cupy":
        assert "[True, False, False]" in completed.stdout
        assert "0.25" in completed.stdout
    if name == "mpi":
        printed = re.findall(r"\[(.*?)\]", completed.stdout)
        assert len(printed) == 2
        for weights in printed:
            assert [float(weight) for weight in weights.split()] == pytest.approx([1, -2, 3, -4], abs=0.01)


def test_the_commands_are_those_that_are_known() -> None:
    assert {name: page for name, (page, _) in COMMANDS.items()} == {
        "digits": "README.md",
        "tests": "README.md",
        **dict.fromkeys(("fsdp", "rl", "lightning", "jax"), "examples/README.md"),
    }


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_is_one_line_that_says_how_long_it_takes_and_what_it_downloads(name: str) -> None:
    page, block = COMMANDS[name]
    line, end = block.split("\n")
    assert end == ""
    start = "python3 -m venv .venv && .venv/bin/python -m pip install "
    assert re.fullmatch(re.escape(start) + r"[^&|;]+ && \.venv/bin/[^&|;]+", line), line
    before = PAGES[page].partition(f"<!-- command: {name} -->")[0].rstrip().rpartition("\n\n")[2]
    assert re.search(r"takes about \d+ minutes?\b", before), before
    assert re.search(r"downloads \d+ [MG]B", " ".join(before.split())), before


def anchors(text: str) -> set[str]:
    """Return the names that GitHub gives to a page's headings."""
    without_blocks = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", without_blocks, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), link
        if anchor:
            assert anchor in anchors(path.read_text()), link


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), ["README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page not in PAGES:
            continue
        reached.add(page)
        for link in re.findall(r"\]\(([^)\s#]+\.md)", PAGES[page]):
            waiting.append(os.path.relpath((ROOT / page).parent / link, ROOT))
    assert reached == set(PAGES)


def test_the_documents_tell_nothing_of_the_machine_they_were_written_on() -> None:
    texts = {**PAGES, **{path.name: path.read_text() for path in ROOT.glob("examples/**/*.py")}}
    for name, text in texts.items():
        assert not re.search(r"/(root|work|home|tmp|opt)/", text), name
