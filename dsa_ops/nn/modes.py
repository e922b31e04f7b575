"""Stages of training for a whole model."""

from collections.abc import Iterator
from typing import TypeVar

from torch import nn

from .attention import MODES, DSAttention
from .indexer import LightningIndexer

__all__ = ["indexer_parameters", "set_mode"]

Module = TypeVar("Module", bound=nn.Module)

# Kept on the module that owns a parameter, so that it survives deepcopy and pickling with it.
_FROZEN = "_dsa_frozen_parameters"


def indexer_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Every parameter of every indexer in `module`: an optimizer group of their own, usually."""
    for child in module.modules():
        if isinstance(child, LightningIndexer):
            yield from child.parameters()


def set_mode(module: Module, mode: str) -> Module:
    """Sets `mode` on every `DSAttention` in `module` and freezes what that stage does not train.

    "warmup" trains the indexers alone, "sparse" everything, "dense" and "frozen" everything but the indexers. Only what
    an earlier call froze is made trainable again: a parameter that you froze yourself stays frozen.
    Returns `module`.

    Raises ValueError for an unknown mode and where `module` has no `DSAttention`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"set_mode: module must be a torch.nn.Module, got {type(module).__name__}")
    if mode not in MODES:
        raise ValueError(f"set_mode: mode must be one of {', '.join(MODES)}, got {mode!r}")
    layers = [child for child in module.modules() if isinstance(child, DSAttention)]
    if not layers:
        raise ValueError(f"set_mode: module must hold a DSAttention, got {type(module).__name__} without one")
    for layer in layers:
        layer.mode = mode
    indexers = {id(parameter) for parameter in indexer_parameters(module)}
    for child in module.modules():
        frozen = set(getattr(child, _FROZEN, ()))
        for name, parameter in child.named_parameters(recurse=False):
            trains = mode == "sparse" or (id(parameter) in indexers) == (mode == "warmup")
            if trains and name in frozen:
                parameter.requires_grad_(True)
                frozen.discard(name)
            elif not trains and parameter.requires_grad:
                parameter.requires_grad_(False)
                frozen.add(name)
        if frozen or hasattr(child, _FROZEN):
            setattr(child, _FROZEN, tuple(sorted(frozen)))
    return module
