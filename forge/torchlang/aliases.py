"""The helpers for functions with several names in torch: one symbol for all spellings of a name, and the error for an
argument that is neither a tensor nor a number."""

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from forge.ir import NUMBER_TYPES, Dim, Number, Symbol, TensorProxy, check
from forge.torchlang.core import torchsymbol

TensorOrNumber = TensorProxy | Number
Lengths = Dim | Sequence[Dim]  # one length per dim, or one for all
results: ModuleType = torch.return_types  # of proxies here; its stubs have tensors, and few of its names


def aliases(*names: str, inplace: bool = False) -> tuple[Callable, ...]:
    """Return torch's functions and methods of these names (torch.x, Tensor.x, torch.special.x), or those in place."""
    suffix = "_" if inplace else ""
    functions = [getattr(owner, name + suffix, None) for name in names for owner in (torch, Tensor, torch.special)]
    return tuple({id(function): function for function in functions if function is not None}.values())


def torchaliases(*names: str, more: tuple = (), inplace: tuple = (), tags: tuple = ()) -> Callable[[Callable], Symbol]:
    """Return the torchsymbol decorator for every spelling of these names, in-place forms included, and for the
    functions in `more`."""
    return torchsymbol(
        *aliases(*names), *more, inplace=(*aliases(*names, inplace=True), *inplace), tags=tags, id=_id(names[0])
    )


def _id(name: str) -> str:
    owner = next(path for path, owner in _OWNERS.items() if hasattr(owner, name))
    return f"{owner}.{name}"


_OWNERS = {"torch": torch, "torch.Tensor": Tensor, "torch.special": torch.special}


def check_operands(op: str, **arguments: object) -> None:
    """Raise TypeError, in torch's words, naming the first argument that is neither a tensor nor a number."""
    for name, value in arguments.items():
        check(
            isinstance(value, (TensorProxy, *NUMBER_TYPES)),
            lambda name=name, value=value: (
                f"{op}(): argument '{name}' must be Tensor or Number, not {type(value).__name__}"
            ),
            TypeError,
        )
