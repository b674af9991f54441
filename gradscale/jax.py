"""A package of its own: ``gradscale_jax``."""

msg = "gradscale.jax is a package of its own: from gradscale_jax import value_and_grad"
raise ModuleNotFoundError(msg, name=__name__)
