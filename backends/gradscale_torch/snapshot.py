"""TensorSnapshot: copies of tensors and of modules' persistent buffers, from which a skipped step restores them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from gradscale.core.snapshot import HOLDABLE
from gradscale.core.validation import wrong_type
from gradscale_torch.devices import to_device
from gradscale_torch.gradients import local_tensor

Tensor = torch.Tensor
_Slot: TypeAlias = tuple[object, str]
"""A module and the name of a buffer; of a tensor itself its ``id()`` and no name."""


class _Group(NamedTuple):
    """Tensors of one device and dtype, and their copies, which are parts of one tensor."""

    tensors: list[Tensor]
    flat: Tensor
    copies: list[Tensor]


class TensorSnapshot:
    """Copies as of the last step that was not skipped; they follow conversions, moves and loads of a state dict."""

    def __init__(self, wanted: Sequence[object]) -> None:
        self._wanted, self._tensors, modules = wanted, list[Tensor](), list[torch.nn.Module]()
        for each in wanted:
            if isinstance(each, torch.nn.Module):
                # A forward pass may add buffers, but not to a compiled module.
                modules += [x for x in each.modules() if x._buffers or not isinstance(x, torch.jit.ScriptModule)]
            elif isinstance(each, Tensor):
                self._tensors.append(each)
            else:
                raise wrong_type(each, "hold", HOLDABLE)
        self._modules = dict.fromkeys(modules)
        self._require_writable()
        # Also buffers that are registered as None.
        self._registered = {(module, name) for module in self._modules for name in module._buffers}
        self._pairs: dict[_Slot, tuple[Tensor, Tensor]] = {}
        self._groups: list[_Group] = []
        self._follow()
        for module in self._modules:
            if _copy_loaded not in module._load_state_dict_post_hooks.values():
                module.register_load_state_dict_post_hook(_copy_loaded)  # type: ignore[no-untyped-call]
        _snapshots.add(self)

    def _require_writable(self) -> None:
        """Raise InvalidTypeError for tensors that cannot be written back, and for modules that do not say so."""
        if any(isinstance(module, torch.jit.ScriptModule) for module in self._modules):
            advice = " with a ScriptModule, which says nothing of what it loads"
            raise wrong_type(self._wanted, "hold", HOLDABLE, advice)
        for tensor in self._current().values():
            is_there = tensor.layout == torch.strided and not (tensor.is_meta or torch.nn.parameter.is_lazy(tensor))
            if not is_there or tensor.is_inference() or (0 in tensor.stride() and not tensor.is_contiguous()):
                raise wrong_type(tensor, "hold", HOLDABLE, ", which has no values to write, or shares them")

    def _current(self) -> dict[_Slot, Tensor]:
        """Return the present tensors, of which a framework may have replaced some. Other buffers are constants."""
        tensors: dict[_Slot, Tensor] = {(id(each), ""): each for each in self._tensors}
        tensors |= {
            (module, name): x
            for module in self._modules
            for name, x in module._buffers.items()
            if x is not None and name not in module._non_persistent_buffers_set
        }
        return tensors

    @torch.no_grad()
    def _follow(self) -> None:
        """Give the copies the device and dtype of the present tensors; the copy of a new tensor is its value."""
        current, old = self._current(), self._pairs
        if current.keys() == old.keys() and all(
            one is old[slot][0] and _kind(one) == _kind(old[slot][1]) for slot, one in current.items()
        ):
            return
        self._groups, self._pairs = [], {}
        kinds: dict[object, dict[_Slot, Tensor]] = {}
        for slot, tensor in current.items():
            kinds.setdefault(_kind(tensor), {})[slot] = tensor
        for kind in kinds.values():
            tensors = [*map(local_tensor, kind.values())]
            flat = torch.cat([each.reshape(-1) for each in tensors])
            parts = torch.split(flat, [each.numel() for each in tensors])
            copies = [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]
            self._groups.append(_Group(tensors, flat, copies))
            self._pairs |= zip(kind, zip(kind.values(), copies, strict=True), strict=True)
        for slot in current.keys() & old.keys():
            if self._pairs[slot][1].shape == old[slot][1].shape:
                self._pairs[slot][1].copy_(old[slot][1])

    @property
    def takes_flags(self) -> bool:
        """Whether the copies fit the present tensors; else the host has to know what to restore."""
        current = self._current()
        return current.keys() == self._pairs.keys() and all(
            one.shape == self._pairs[slot][1].shape for slot, one in current.items()
        )

    def anew(self) -> TensorSnapshot:
        """Return other copies of the same tensors, as they are now."""
        return TensorSnapshot(self._wanted)

    @torch.no_grad()
    def save(self) -> None:
        """Copy the tensors anew."""
        self._follow()
        for group in self._groups:
            torch._foreach_copy_(group.copies, group.tensors)

    @torch.no_grad()
    def restore(self, skips: Sequence[Tensor] = ()) -> None:
        """Write the copies back. With ``skips``, 0-d on a device, only if one is not 0, else copy the tensors anew."""
        self._restore_buffers(clones=len(skips) > 0)
        self._follow()
        for group in self._groups:
            if skips:
                is_skipped = functools.reduce(torch.logical_or, [to_device(x, group.flat.device) != 0 for x in skips])
                now = torch.cat([each.reshape(-1) for each in group.tensors])
                torch.where(is_skipped, group.flat, now, out=group.flat)
            torch._foreach_copy_(group.tensors, group.copies)

    def _restore_buffers(self, *, clones: bool) -> None:
        """Restore the buffers that the forward pass has replaced, added or removed, or make ``clones`` to write to."""
        current = self._current()
        for slot in current.keys() | self._pairs.keys():
            owner, name = slot
            old, copy = self._pairs.get(slot, (None, None))
            new = current.get(slot)
            if new is old or not isinstance(owner, torch.nn.Module):
                continue
            if clones and new is not None:
                # The forward pass may have made a batch itself the buffer, which must not be written.
                owner._buffers[name] = new.clone()
            elif old is None and slot not in self._registered:
                delattr(owner, name)
            # A module that was converted or moved keeps what it has.
            elif new is None or copy is None or new.shape != copy.shape or _kind(new) == _kind(copy):
                owner._buffers[name] = old

    @torch.no_grad()
    def keep(self, module: torch.nn.Module) -> None:
        """Copy the buffers of one module anew, if it is one of these."""
        if module in self._modules:
            self._follow()
        for (owner, _), (tensor, copy) in self._pairs.items():
            if owner is module:
                copy.copy_(tensor)


def _kind(tensor: Tensor) -> tuple[torch.device, torch.dtype]:
    return tensor.device, tensor.dtype


_snapshots = weakref.WeakSet[TensorSnapshot]()


def _copy_loaded(module: torch.nn.Module, _: object) -> None:
    """Copy what a module has loaded; a function, since copies and pickles of a model hold it."""
    # Nearly all modules have nothing to copy, and each copy looks through all of them.
    for snapshot in _snapshots if module._buffers else ():
        snapshot.keep(module)
