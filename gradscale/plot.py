"""Plots of runs and simulations."""

from gradscale.tools.plot import *  # noqa: F403
from gradscale.tools.plot import __all__ as __all__

__dir__ = __all__.copy
