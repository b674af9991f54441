"""The site: the pages of the repository, from where they are, and the reference of every public name.

``.ci/run docs`` builds it. A page is a Markdown file that ``contents.md`` names; one that it does not name is an error,
and so is a link that leads nowhere, a name that is not there, and a public name that no page of ``api`` documents.
"""

import functools
import importlib
import os
import re
import shutil
import sys
import tomllib
import types
import urllib.request
from pathlib import Path
from typing import Any

from docutils import nodes
from numpydoc.xref import DEFAULT_LINKS
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.ext.autodoc.mock import mock
from sphinx.ext.intersphinx import InventoryAdapter
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import gradscale

ROOT = Path(__file__).parents[2]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = METADATA["urls"]["Source"]
LOGGER = logging.getLogger(__name__)

project = METADATA["name"]
author = METADATA["authors"][0]["name"]
copyright = author  # noqa: A001 (the name is Sphinx's)
release = gradscale.__version__

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.viewcode"]
extensions += ["sphinx_copybutton"]
nitpicky = True
myst_heading_anchors = 4

autodoc_member_order = "bysource"
# A signature that is long has a line for each argument, with its type and default. The tables below say them in words.
autodoc_typehints = "signature"
autodoc_type_aliases = {
    name: name for name in ("Array", "Batch", "Device", "DTypeLike", "Namespace", "NormOver", "Optimizer")
}
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False
templates_path = ["templates"]  # numpydoc's, with the example first
numpydoc_show_class_members = False
numpydoc_xref_param_type = True
# Types are words. Those that are names of gradscale become links, and any other stays a word.
numpydoc_xref_ignore = "all"
numpydoc_xref_aliases = {word: word for word in DEFAULT_LINKS}
numpydoc_xref_aliases |= {name: f"gradscale.{name}" for name in dir(gradscale)}
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"gradscale {release}"
html_static_path = [str(Path(__file__).parent / name) for name in ("site.css", "site.js")]
html_css_files, html_js_files = ["site.css"], [("site.js", {"defer": "defer"})]
html_theme_options = {"source_repository": REPOSITORY, "top_of_page_buttons": []}
html_show_sourcelink = False
copybutton_exclude = ".linenos, .gp, .go"

# What the packages' users know by these names. A host that cannot be reached takes its package's links with it, and
# nothing else: references to that package are plain text then, those to gradscale are held to leading somewhere.
INVENTORIES = {
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "jax": "https://docs.jax.dev/en/latest/",
    "mpi4py": "https://mpi4py.readthedocs.io/en/stable/",
    "optax": "https://optax.readthedocs.io/en/latest/",
}


def is_reachable(address: str) -> bool:
    """Return whether an inventory can be had."""
    try:
        # Some hosts refuse Python's own name.
        wanted = urllib.request.Request(f"{address}objects.inv", headers={"User-Agent": "Sphinx"})
        with urllib.request.urlopen(wanted, timeout=10):
            return True
    except OSError:
        return False


intersphinx_mapping = {name: (address, None) for name, address in INVENTORIES.items() if is_reachable(address)}
UNREACHED = INVENTORIES.keys() - intersphinx_mapping.keys()
if UNREACHED:
    print("not reached, so that nothing links there:", *sorted(UNREACHED), file=sys.stderr)
PACKAGES = (UNREACHED - {"python"}) | (sys.stdlib_module_names if "python" in UNREACHED else set())
# An adapter's default for ``collect``, which no page shows.
nitpick_ignore = [
    ("py:class", "gradscale.core.gradients.Gradients"),
    ("py:class", "gradscale.core.snapshot.ArraySnapshot"),
    ("py:class", "gradscale_torch.snapshot.TensorSnapshot"),
]
nitpick_ignore_regex = [(r"py:.*", rf"({'|'.join(sorted(PACKAGES))})(\..*)?")] if PACKAGES else []

# CuPy and nccl4py cannot be imported without CUDA, and Keras has one backend in a process: stand-ins do for the names.
with mock(["cupy", "cupyx", "cuda", "nccl"]):
    importlib.import_module("gradscale_cupy")
    importlib.import_module("gradscale_nccl")
keras = sys.modules["keras"] = types.ModuleType("keras")
vars(keras)["optimizers"] = types.SimpleNamespace(LossScaleOptimizer=object)
vars(keras)["saving"] = types.SimpleNamespace(register_keras_serializable=lambda _: lambda cls: cls)
for backend in ("torch", "jax"):
    vars(keras)["config"] = types.SimpleNamespace(backend=functools.partial(str, backend))
    importlib.import_module(f"gradscale_{backend}.keras_optimizer")

# The modules whose public names the reference has, all of them.
DOCUMENTED = (
    *("gradscale", "gradscale.errors", "gradscale.tools.simulation"),
    *("gradscale_numpy", "gradscale_numpy.mpi", "gradscale_torch", "gradscale_torch.plugins", "gradscale_cupy"),
    *("gradscale_nccl", "gradscale_mlx"),
    *("gradscale_jax", "gradscale_torch.keras_optimizer", "gradscale_jax.keras_optimizer"),
)

PAGES = ("*.md", *(f"{folder}/*.md" for folder in (".github", "gradscale/**", "backends/*", "examples", "tests/**")))
PAGES += (".ci/docs/api/*.rst",)
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
# What a search for these words finds first: entries of the index, which a reader of the page does not see.
SEARCHED = re.compile(r"^<!-- search: (.*) -->$", flags=re.MULTILINE)


def place(path: Path) -> str:
    """Return where the site has a page: where the repository has it, but for folders with a dot, and for READMEs."""
    name = path.relative_to(ROOT).as_posix()
    return re.sub(r"README\.md$", "index.md", re.sub(r"^\.(ci/docs|github)/", "", name))


def gather(app: Sphinx, *_: object) -> None:
    """Put the pages into the folder that is built, with links that lead from there."""
    if app.srcdir.resolve().is_relative_to(ROOT):
        msg = f"the pages are gathered in an empty folder outside of the clone, got {app.srcdir}"
        raise ExtensionError(msg)
    pages = {path: place(path) for pattern in PAGES for path in ROOT.glob(pattern)}
    for page, name in pages.items():

        def moved(link: re.Match[str], page: Path = page, name: str = name) -> str:
            target = Path(os.path.normpath(page.parent / link[1]))
            if "://" in link[1] or not target.exists():
                return link[1]
            if target not in pages and target.suffix != ".svg":
                return f"{REPOSITORY}/blob/main/{target.relative_to(ROOT).as_posix()}"
            there = Path(app.srcdir, pages.get(target) or target.relative_to(ROOT))
            if target not in pages:
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(target, there)
            return os.path.relpath(there, Path(app.srcdir, name).parent)

        text = page.read_text()
        if page.suffix == ".md":
            # The ways back are those of a reader who has no list of pages at the side.
            text = re.sub(r"^\[Back to .*\n", "", LINK.sub(moved, text), flags=re.MULTILINE)
            text = SEARCHED.sub(lambda found: f"```{{index}} ! {found[1].replace(', ', ', ! ')}\n```", text)
        if name == "index.md":
            text = text.replace(f"({METADATA['urls']['Documentation']})", "(api/index.rst)")  # what is here already
            text += "\n" + (Path(__file__).parent / "contents.md").read_text()
        written = Path(app.srcdir, name)
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(text)


def link_names(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Make links of the names that pages have in code, as they stand or as they are called: gradscale's and others'."""
    names = app.env.domains["py"].objects
    elsewhere = {
        name: item.uri
        for kind, items in InventoryAdapter(app.env).main_inventory.items()
        if kind.startswith("py:")
        for name, item in items.items()
    }
    for literal in list(doctree.findall(nodes.literal)):
        if isinstance(literal.parent.parent, nodes.reference) or isinstance(literal.parent, nodes.reference):
            continue  # the page has made a link of it already
        if "xref" in literal.get("classes", ()):
            continue
        name = re.sub(r"^scaler\.", "gradscale.GradScaler.", re.sub(r"\(.*\)$", "", literal.astext()))
        if name in names and names[name].docname != docname:
            found = names[name]
            link = make_refnode(app.builder, docname, found.docname, found.node_id, literal.deepcopy(), name)
            literal.replace_self(link)
        elif "." in name and name in elsewhere:
            literal.replace_self(nodes.reference("", "", literal.deepcopy(), internal=False, refuri=elsewhere[name]))


def write_signature(
    _app: Sphinx, _what: str, _name: str, _object: object, _options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Write types as the code has them, and a function that is a default as any other than None."""

    def written(text: str | None) -> str | None:
        plain = re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text or "")
        plain = re.sub(r"(~?numpy\.ndarray)\[~?tuple\[[^]]*\], (?:[^][]|\[[^]]*\])*\]", r"\1", plain)
        return re.sub(r"<function \w+>", "...", plain) or None

    return written(signature), written(returns)


def keep_type(_app: Sphinx, _env: BuildEnvironment, node: nodes.Node, word: nodes.Node) -> nodes.Node | None:
    """Leave a type of a signature as a word if no page describes it."""
    while node.parent is not None and not isinstance(node, addnodes.desc_signature):
        node = node.parent
    return word if isinstance(node, addnodes.desc_signature) else None


def list_arguments(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _: object) -> None:
    """Make the arguments of a signature lines, where Sphinx has a list of definitions without terms."""

    def lines(found: re.Match[str]) -> str:
        return found[0].replace("dl>", "div>").replace("<dd>", '<div class="argument">').replace("</dd>", "</div>")

    if "body" in context:
        context["body"] = re.sub(r"<dl>\n(?:<dd>.*</dd>\n)+</dl>", lines, context["body"])


def public_names(module: types.ModuleType) -> list[str]:
    """Return the names that a module lists as public, or else those of what it defines."""
    if module is gradscale:
        return dir(gradscale)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    listed: list[str] = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    return listed


def find_undocumented(_: Sphinx, env: BuildEnvironment) -> None:
    """Hold the reference to having every public name; a module among them has its own names instead."""
    public = {name: public_names(importlib.import_module(name)) for name in DOCUMENTED}
    for name in public["gradscale"]:
        if isinstance(getattr(gradscale, name), types.ModuleType):
            public[f"gradscale.{name}"] = public_names(getattr(gradscale, name))
    documented = {*env.domains["py"].objects, *public, "gradscale.__version__"}
    for missing in sorted({f"{module}.{name}" for module, names in public.items() for name in names} - documented):
        LOGGER.warning("no page of the reference has %s", missing)


def setup(app: Sphinx) -> None:
    """Connect what Sphinx has no setting for."""
    app.connect("config-inited", gather, priority=0)
    app.connect("autodoc-process-signature", write_signature)
    app.connect("missing-reference", keep_type, priority=900)  # after other projects' pages
    app.connect("doctree-resolved", link_names)
    app.connect("html-page-context", list_arguments)
    app.connect("env-check-consistency", find_undocumented)
