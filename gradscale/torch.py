"""A package of its own: ``gradscale_torch``."""

msg = "gradscale.torch is a package of its own: from gradscale_torch import GradScaler"
raise ModuleNotFoundError(msg, name=__name__)
