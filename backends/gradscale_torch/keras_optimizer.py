"""ScaledOptimizer: Keras's LossScaleOptimizer on torch, with a scaler of gradscale's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

from gradscale.core.validation import wrong_type
from gradscale.extras import import_keras, require_unscaled, require_variables
from gradscale.scaler.scaler import iteration_of
from gradscale_torch.amp import GradScaler

keras = import_keras("torch")

__all__ = ["ScaledOptimizer"]
__dir__ = __all__.copy

_SCALER = "scaler"


@keras.saving.register_keras_serializable("gradscale_torch")
class ScaledOptimizer(keras.optimizers.LossScaleOptimizer):  # type: ignore[misc,name-defined]
    """A Keras optimizer whose loss is scaled, and whose steps are skipped, by a scaler of gradscale's.

    Give it to ``model.compile``, which then puts no ``LossScaleOptimizer`` of Keras's own around it. The schedules and
    ``iterations`` are the inner optimizer's, and hold on skipped steps.

    Parameters
    ----------
    inner_optimizer : keras.optimizers.Optimizer
        Makes the steps, and sees unscaled gradients; none that scales by itself.
    scaler : GradScaler or ShardedGradScaler, optional
        Of ``gradscale_torch``; an attribute, too: ``optimizer.scaler.last_step(optimizer)`` says what happened.
        Default: a ``GradScaler`` for the device that Keras computes on, which takes the float16 gradients of float16
        variables.
    name : str, optional
        As in Keras.

    Raises
    ------
    InvalidTypeError
        For a scaler that is not of ``gradscale_torch``, or an inner optimizer that is none or scales already.
    BackendNotAvailableError
        When this module is imported without Keras, or with Keras on another backend than torch.

    Notes
    -----
    ``model.save`` saves the scaler's state dict. ``load_model`` makes a ``GradScaler`` of it: import this module first.
    For another scaler load that state into it, and assign it to ``model.optimizer.scaler``. ``save_weights`` saves it,
    too, and ``load_weights`` loads it, as do Keras's callbacks ``BackupAndRestore`` and ``ModelCheckpoint``.

    Gradients that Keras's float8 layers write into their scales are divided as all others: use float8 without this.

    Examples
    --------
    >>> import keras, torch
    >>> from gradscale_torch.keras_optimizer import ScaledOptimizer
    >>> optimizer, weight = ScaledOptimizer(keras.optimizers.SGD(0.25)), keras.Variable([1.0, 2.0])
    >>> scaled = optimizer.scale_loss(weight.value.square().sum())
    >>> _ = optimizer.apply_gradients([(torch.autograd.grad(scaled, weight.value)[0], weight)])
    >>> print(weight.numpy(), optimizer.scaler.last_step(optimizer).skipped)
    [0.5 1. ] False
    """

    def __init__(self, inner_optimizer: Any, scaler: GradScaler | None = None, name: str | None = None) -> None:
        if scaler is None:
            scaler = _new_scaler()
        elif not isinstance(scaler, GradScaler):
            raise wrong_type(scaler, "scaler", "a GradScaler or ShardedGradScaler of gradscale_torch")
        require_unscaled(keras, inner_optimizer)
        super().__init__(inner_optimizer, name=name)
        self.scaler = scaler

    def build(self, var_list: Sequence[object]) -> None:
        """Make the inner optimizer's variables, and none for a scale."""
        self.inner_optimizer.build(var_list)
        super(keras.optimizers.LossScaleOptimizer, self).build(var_list)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss by the scale."""
        scaled: torch.Tensor = self.scaler.scale(loss)
        return scaled

    def apply(self, grads: Sequence[torch.Tensor | None], trainable_variables: Sequence[Any] | None = None) -> None:
        """Unscale the gradients, in place, step unless one of them is inf or NaN, and adapt the scale.

        Parameters
        ----------
        grads : sequence of Tensor or None
            Gradients of the scaled loss.
        trainable_variables : sequence of keras.Variable
            One for each gradient, which becomes its tensor's, in the same dtype. InvalidValueError if there are none.
        """
        variables = require_variables(self, trainable_variables)
        weights = [variable.value for variable in variables]
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = None if grad is None else grad.to(weight.dtype)
        self.param_groups = [{"params": weights}]
        try:
            self.scaler.step(self, variables)
            self.scaler.update()
        except BaseException:
            # Nobody else ends the iteration before fit is called again.
            if self.scaler.is_enabled() and not iteration_of(self.scaler).is_at_boundary:
                with contextlib.suppress(Exception):
                    self.scaler.update(self.scaler.get_scale())
            raise

    def step(self, trainable_variables: Sequence[Any]) -> None:
        """Step the inner optimizer; the scaler calls it, if no gradient is inf or NaN."""
        self.inner_optimizer.apply([variable.value.grad for variable in trainable_variables], trainable_variables)

    def save_own_variables(self, store: MutableMapping[str, torch.Tensor]) -> None:
        """Write the variables, and the scaler's state unless it is disabled; Keras calls it, also for weights alone."""
        super().save_own_variables(store)
        if state := self.scaler.state_dict():
            # Keras's stores hold numbers alone.
            store[_SCALER] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    def load_own_variables(self, store: MutableMapping[str, torch.Tensor]) -> None:
        """Read what :meth:`save_own_variables` has written; the scaler stays as it is if the store has no state."""
        entries = {key: store[key] for key in store.keys()}  # noqa: SIM118 - a store of Keras's is no mapping
        state = entries.pop(_SCALER, None)
        super().load_own_variables(entries)
        if state is not None:
            self.scaler.load_state_dict(json.loads(bytes(state.tolist())))

    def get_config(self) -> dict[str, object]:
        """Return the settings that Keras saves: the inner optimizer, and the scaler's state."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner, "scaler": self.scaler.state_dict()}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, object] | None = None) -> ScaledOptimizer:
        """Return the optimizer that was saved, with a ``GradScaler`` of that state; StateDictError if it is bad."""
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects=custom_objects)
        scaler = _new_scaler(enabled=config["scaler"] != {})
        scaler.load_state_dict(config["scaler"])
        return cls(inner, scaler, config["name"])


def _new_scaler(enabled: bool = True) -> GradScaler:
    device = keras.ops.convert_to_tensor(0.0).device.type
    return GradScaler(device, enabled=enabled, allow_fp16_grads=True)
