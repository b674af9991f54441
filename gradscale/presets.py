"""The policies of other systems."""

from gradscale.policies.presets import *  # noqa: F403
from gradscale.policies.presets import __all__ as __all__
from gradscale.policies.presets import __getattr__ as __getattr__

__dir__ = __all__.copy
