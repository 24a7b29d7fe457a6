"""`swap`: makes of any torch optimizer class one whose state lives in host memory.

Owns: the classes that were made, and how they are named and pickled. Must not know: what such a class does
(`swapped`)."""

from __future__ import annotations

import copyreg
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from orlop.errors import OptimizerRefused
from orlop.optim.swapped import WINDOW_BYTES, Swapped

__all__ = ["SwapAdamW", "Swapped", "swap"]

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_made: dict[type[Optimizer], type[Swapped]] = {}


def swap(optimizer_class: type[OptimizerT]) -> type[OptimizerT]:
    """A subclass of `optimizer_class` whose state lives in host memory.

    Its constructor takes what the class takes, and `window_bytes`. It steps by the class's own update; how
    much of the optimizer one call is shown is proven when it is constructed (see `orlop.optim.proof`).

    Args:
        optimizer_class: Any `torch.optim.Optimizer` class.

    Returns:
        The same class for the same argument, named ``Swap`` and the class's name.

    Raises:
        OptimizerRefused: The argument is not an optimizer class.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise OptimizerRefused(
            "swap takes an optimizer class", expected="a torch.optim.Optimizer", found=repr(optimizer_class)
        )
    if issubclass(optimizer_class, Swapped):
        return optimizer_class
    if optimizer_class not in _made:
        body: dict[str, Any] = {
            "__reduce_ex__": _reduce,
            "swapped_class": optimizer_class,
            "__doc__": f"{optimizer_class.__name__} with its state in host memory.",
        }
        _made[optimizer_class] = type(f"Swap{optimizer_class.__name__}", (Swapped, optimizer_class), body)
    return cast("type[OptimizerT]", _made[optimizer_class])


class SwapAdamW(Swapped, torch.optim.AdamW):
    """`torch.optim.AdamW` with its moments in host memory; the update is torch's, bit for bit.

    Args:
        params: Parameters, named parameters or param groups.
        lr: Learning rate; a tensor stays the tensor that it is.
        betas: Decay of the running averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        amsgrad: Keep the largest second moment too.
        maximize: Ascend instead of descend.
        foreach: Torch's choice of implementation, as `fused` and `capturable` are.
        capturable: See `torch.optim.AdamW`.
        differentiable: Refused when True.
        fused: See `torch.optim.AdamW`.
        window_bytes: The most device memory that state may take during `step`.
        step_in_backward: Step during the backward pass; see `Swapped`.
    """

    swapped_class = torch.optim.AdamW

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        window_bytes: int = WINDOW_BYTES,
        step_in_backward: bool | int = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            window_bytes=window_bytes,
            step_in_backward=step_in_backward,
        )


_made[torch.optim.AdamW] = SwapAdamW


def _reduce(self: Swapped, protocol: Any) -> tuple[Any, ...]:
    """A class that `swap` made has no name to import it by: it is made again, from the class that has."""
    if _made.get(self.swapped_class) is type(self):
        return _blank, (self.swapped_class,), self.__getstate__()
    return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]


def _blank(optimizer_class: type[Optimizer]) -> Optimizer:
    """An object of the swapped class without its attributes, for unpickling."""
    made = swap(optimizer_class)
    return made.__new__(made)
