"""Callbacks for ``on_skip`` and ``on_update``, and logs."""

from gradscale.tools.callbacks import *  # noqa: F403
from gradscale.tools.callbacks import __all__ as __all__

__dir__ = __all__.copy
