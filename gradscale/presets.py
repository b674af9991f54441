"""The policies of other systems."""

from typing import TYPE_CHECKING

from gradscale.policies.presets import *  # noqa: F403
from gradscale.policies.presets import __all__ as __all__

if not TYPE_CHECKING:
    from gradscale.policies.presets import __getattr__ as __getattr__

__dir__ = __all__.copy
