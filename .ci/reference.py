"""Write the reference of every public class and function as HTML pages, with pdoc; a warning is an error.

python .ci/reference.py FOLDER
"""

import importlib
import inspect
import sys
import types
import typing
import warnings
from pathlib import Path

import pdoc

# In the order of the list beside each page. The adapters need their libraries; CuPy's, which needs CUDA, has its page.
MODULES = (
    *("gradscale", "gradscale.errors", "gradscale.policies.presets", "gradscale.policies.rules"),
    *("gradscale.policies.simulation", "gradscale.reports.callbacks", "gradscale.reports.plot"),
    *("gradscale.core.registry", "gradscale.core.tree"),  # gradscale.testing comes with gradscale
    *("gradscale_numpy", "gradscale_torch", "gradscale_torch.plugins", "gradscale_jax"),
)


def resolve(module: types.ModuleType) -> None:
    """Put into a module what pdoc looks up there: names that are loaded when asked for, and named tuples' types."""
    for name in module.__all__:
        found = vars(module).setdefault(name, getattr(module, name))
        if inspect.isclass(found) and issubclass(found, tuple):
            # They hold text, which pdoc would evaluate in the module that it documents, and not in their own.
            names = {
                **vars(typing),
                **vars(importlib.import_module("gradscale")),
                **vars(sys.modules[found.__module__]),
            }
            for holder in (found, found.__new__):
                holder.__annotations__ = {
                    field: typing.get_type_hints(types.SimpleNamespace(__annotations__={field: said}), names)[field]
                    for field, said in holder.__annotations__.items()
                }


def main(folder: Path) -> None:
    """Write the pages."""
    warnings.simplefilter("error")
    for name in MODULES:
        resolve(importlib.import_module(name))
    pdoc.render.configure(docformat="numpy", footer_text="gradscale", search=True)
    pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
