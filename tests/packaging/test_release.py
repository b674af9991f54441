"""What a release says of itself in several places is the same in all of them."""

import re
from pathlib import Path

import gradscale

ROOT = Path(__file__).parents[2]


def test_the_citation_is_of_this_version() -> None:
    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE) == [
        gradscale.__version__
    ]


def test_the_newest_changes_are_of_this_version() -> None:
    newest = re.findall(
        r"^## (\S+) \((unreleased|\d{4}-\d{2}-\d{2})\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert newest[0][0] == gradscale.__version__
