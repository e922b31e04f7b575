"""FLOP formulas, handed to torch.utils.flop_counter once somebody loads it: it imports triton, we do not."""

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

COUNTER = "torch.utils.flop_counter"
_formulas: list[tuple[Any, Callable[..., int]]] = []


def register_flops(op: Any, formula: Callable[..., int]) -> None:
    """Count `op` (an OpOverloadPacket) by `formula`, which takes what torch.utils.flop_counter's formulas take."""
    _formulas.append((op, formula))
    if COUNTER in sys.modules:
        _hand_over(sys.modules[COUNTER], [_formulas[-1]])


def _hand_over(counter: ModuleType, formulas: list[tuple[Any, Callable[..., int]]]) -> None:
    for op, formula in formulas:
        counter.register_flop_formula(op)(formula)


class _WhenLoaded:
    """Finds the counter as others would, and adds one step to loading it."""

    def __init__(self) -> None:
        self.asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != COUNTER or self.asking:
            return None
        self.asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_hand_over(module: ModuleType) -> None:
            execute(module)
            _hand_over(module, _formulas)
            if self in sys.meta_path:  # only now: whoever asks for the spec need not load it
                sys.meta_path.remove(self)  # type: ignore[arg-type]

        spec.loader.exec_module = execute_and_hand_over  # type: ignore[method-assign]
        return spec


if COUNTER not in sys.modules:
    sys.meta_path.insert(0, _WhenLoaded())  # type: ignore[arg-type]
