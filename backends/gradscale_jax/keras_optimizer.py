"""ScaledOptimizer: Keras's LossScaleOptimizer on JAX, with any policy of gradscale's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from gradscale import DynamicScale, ScaleState
from gradscale.core import validation
from gradscale.core.protocols import Policy
from gradscale.errors import InvalidValueError
from gradscale.extras import import_keras, require_unscaled, require_variables
from gradscale.scaler import checkpoint
from gradscale_jax import trees

keras = import_keras("jax")

_Values: TypeAlias = Sequence[jax.Array]

__all__ = ["ScaledOptimizer"]
__dir__ = __all__.copy


@keras.saving.register_keras_serializable("gradscale_jax")
class ScaledOptimizer(keras.optimizers.LossScaleOptimizer):  # type: ignore[misc,name-defined]
    """A Keras optimizer that scales the loss, skips steps, and adapts the scale by a policy of gradscale's.

    Give it to ``model.compile``, which then puts no ``LossScaleOptimizer`` of Keras's own around it. The schedules and
    ``iterations`` are the inner optimizer's, and hold on skipped steps. Keras's compiled step carries only variables:
    so the scale's state is four of them, which ``model.save`` saves.

    Parameters
    ----------
    inner_optimizer : keras.optimizers.Optimizer
        Makes the steps, and sees unscaled gradients; none that scales by itself.
    policy : Policy, optional
        Such as ``gradscale.presets.keras()``, whose rule is Keras's. Default: ``gradscale.DynamicScale()``.
    name : str, optional
        As in Keras.

    Raises
    ------
    InvalidTypeError
        For a policy that is none, or an inner optimizer that is none or scales already.
    BackendNotAvailableError
        When this module is imported without Keras, or with Keras on another backend than JAX.

    Notes
    -----
    ``model.save`` saves gradscale's own policies; before ``load_model`` import this module. A policy of your own is not
    saved, and ``load_model`` says so.

    Gradients that Keras's float8 layers write into their scales are divided as all others: use float8 without this.

    Examples
    --------
    >>> import jax, keras
    >>> from gradscale_jax.keras_optimizer import ScaledOptimizer
    >>> optimizer, weight = ScaledOptimizer(keras.optimizers.SGD(0.25)), keras.Variable([1.0, 2.0])
    >>> grads = jax.grad(lambda value: optimizer.scale_loss((value**2).sum()))(weight.value)
    >>> _ = optimizer.apply_gradients([(grads, weight)])
    >>> print(weight.numpy(), optimizer.scale_state.growth_tracker)
    [0.5 1. ] 1
    """

    def __init__(self, inner_optimizer: object, policy: Policy | None = None, name: str | None = None) -> None:
        require_unscaled(keras, inner_optimizer)
        super().__init__(inner_optimizer, name=name)
        self.policy: Policy = DynamicScale() if policy is None else validation.policy(policy)
        self.fields = [keras.Variable(field, trainable=False) for field in self.policy.init(jnp.zeros(()))]

    @property
    def scale_state(self) -> ScaleState[jax.Array]:
        """The scale and its trackers, as arrays of JAX."""
        return ScaleState(*[field.value for field in self.fields])

    def build(self, var_list: Sequence[object]) -> None:
        """Make the inner optimizer's variables; those of the scale are there."""
        self.inner_optimizer.build(var_list)
        super(keras.optimizers.LossScaleOptimizer, self).build(var_list)

    def scale_loss(self, loss: jax.Array) -> jax.Array:
        """Multiply the loss by the scale."""
        return trees.scale(loss, self.scale_state)

    def stateless_apply(
        self, optimizer_variables: _Values, grads: Sequence[jax.Array | None], trainable_variables: _Values
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the next values of the weights and of this optimizer's ``variables``; Keras's compiled step calls it.

        If a gradient holds an inf or NaN, all weights and the inner optimizer's variables stay.
        """
        weights = self._trainable_variables
        values = zip([*weights, *self.variables], [*trainable_variables, *optimizer_variables], strict=True)
        with keras.StatelessScope(list(values)) as scope:
            self.apply(grads, weights)
        return list(map(scope.get_current_value, weights)), list(map(scope.get_current_value, self.variables))

    def apply(self, grads: Sequence[jax.Array | None], trainable_variables: Sequence[Any] | None = None) -> None:
        """Step outside of a compiled step, as :meth:`stateless_apply` does; InvalidValueError without variables."""
        variables = require_variables(self, trainable_variables)
        unscaled, nonfinite = trees.unscale(list(grads), self.scale_state)
        changing = [*variables, *self.inner_optimizer.variables]
        before = [variable.value for variable in changing]
        with keras.StatelessScope(list(zip(changing, before, strict=True))) as scope:
            self.inner_optimizer.apply(unscaled, variables)
        after = trees.select(nonfinite == 0, list(map(scope.get_current_value, changing)), before)
        state = self.policy.update(self.scale_state, nonfinite=nonfinite)
        for variable, value in zip([*self.fields, *changing], [*state, *after], strict=True):
            variable.assign(value)

    def get_config(self) -> dict[str, object]:
        """Return the settings that Keras saves beside the variables: the inner optimizer, and the policy."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        numbers = {"scale": float(self.policy.init(jnp.zeros(())).scale)}
        saved = checkpoint.build(checkpoint.Checkpoint(self.policy, numbers))
        return {"name": self.name, "inner_optimizer": inner, "policy": saved}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, object] | None = None) -> ScaledOptimizer:
        """Return the optimizer that was saved; StateDictError for a bad policy, InvalidValueError for one's own."""
        if "policy" not in config["policy"]:
            msg = (
                "the saved optimizer has a policy of your own, got no more than its factors; load the model with "
                "compile=False, and compile it with ScaledOptimizer(inner_optimizer, policy)"
            )
            raise InvalidValueError(msg)
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects=custom_objects)
        return cls(inner, checkpoint.parse(config["policy"], DynamicScale()).policy, config["name"])
