"""The operators that a manifest may name, and their symbols in forge.

`torch.nn.functional.rms_norm` and other torch functions map to torchlang symbols; `prims.exp2` and `clang.add` to
themselves; `aten::add.out` to the torchlang symbol of the same name and arguments, if there is one; `acme::f`, of a
manifest or of a user's torch.library, to a separate symbol (forge/executors/hubex/functions.py).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from forge import clang, prims, torchlang
from forge.executors.executor import Decision, decline
from forge.executors.hubex.functions import Declarations, Function
from forge.hub.manifest import Checker, KernelEntry, Signature, from_function, from_schema
from forge.hub.manifest.constraints import is_default
from forge.ir import Symbol
from forge.torch_internals.dispatch import (
    dispatch_find_schema_or_throw,
    dispatch_get_all_op_names,
    jit_get_schemas_for_operator,
)
from forge.torch_internals.functions import torch_nn_module

PATTERN = "pattern:"
TORCH_OPS = "torch.ops."


@dataclass(frozen=True)
class Target:
    """The symbol of an operator. `names` maps the symbol's arguments to the operator's.

    function: the declaration of a custom operator, None for torch's own.
    """

    symbol: Symbol
    signature: Signature
    names: Mapping[str, str]
    function: Function | None = None


class Operators:
    """Resolver of operators for manifests. patterns: the references, in plain torch, of patterns by name; declared: the
    operators of the manifest that is being read."""

    def __init__(self, patterns: Mapping[str, Callable] | None = None, declared: Declarations | None = None) -> None:
        self.patterns = dict(patterns or {})
        self.declared = declared or Declarations()

    def resolve(self, name: str) -> Signature | None:
        """Return the signature of an operator, or None for an unknown name."""
        if name.startswith(PATTERN):
            function = self.patterns.get(name.removeprefix(PATTERN))
            return None if function is None else from_function(function, name.removeprefix(PATTERN))
        name = _dispatcher_name(name)
        if "::" in name:
            declared = self.declared.find(name)
            if declared is not None:
                return declared.signature
            schema = _schema(name)
            return None if schema is None else from_schema(schema)
        symbol = _symbol(name)
        return None if symbol is None else symbol_signature(symbol)

    def names(self) -> Iterable[str]:
        """Return the names of all operators, for suggestions."""
        yield from torchlang.all_symbols()
        yield from (prim.id for prim in prims.all_prims().values())
        yield from (symbol.id for symbol in clang.all_symbols().values())
        yield from dispatch_get_all_op_names()
        yield from (PATTERN + name for name in self.patterns)

    def target(self, name: str) -> Target | None:
        """Return the symbol that a kernel of this operator implements, or None if forge has none with the same
        arguments.

        Raises NotImplementedError with the reason why a third-party operator cannot have one.
        """
        name = _dispatcher_name(name)
        if name.startswith("aten::"):
            return _aten_target(name)
        if "::" in name:
            function = self.declared.find_existing(name)
            return None if function is None else _function_target(function)
        symbol = _symbol(name)
        if symbol is None:
            return None
        signature = symbol_signature(symbol)
        return Target(symbol, signature, {parameter.name: parameter.name for parameter in signature.parameters})


def _function_target(function: Function) -> Target:
    return Target(function.symbol, function.signature, {name: name for name in function.signature.by_name}, function)


def _dispatcher_name(name: str) -> str:
    """Return 'acme::f' for 'torch.ops.acme.f', and the symbol's name for an operator in torchlang."""
    own = TORCH_OPS + name.replace("::", ".") if "::" in name else name
    if own in torchlang.all_symbols():
        return own
    if not name.startswith(TORCH_OPS):
        return name
    namespace, _, operator = name.removeprefix(TORCH_OPS).partition(".")
    return f"{namespace}::{operator.removesuffix('.default')}"


@cache
def symbol_signature(symbol: Symbol) -> Signature:
    """Return the signature of a symbol's decomposition or meta function."""
    return from_function(symbol.definition, symbol.id)


def _symbol(name: str) -> Symbol | None:
    owner, _, last = name.partition(".")
    if owner == "prims":
        return prims.all_prims().get(last)
    if owner == "clang":
        return clang.all_symbols().get(last)
    return torchlang.all_symbols().get(name) or _torch_symbol(name)


def _torch_symbol(name: str) -> Symbol | None:
    """Return the symbol of an alias of the torch function, without an import."""
    first, *path = name.split(".")
    function: Any = torch if first == "torch" else None
    for part in path:
        function = getattr(function, part, None) if function is not None and part.isidentifier() else None
    return torchlang.find(function) if callable(function) else None


def _schema(name: str) -> Any:
    """Return the schema of `ns::name.overload`; the overload is optional if there is only one, or a default one."""
    base, _, overload = name.partition(".")
    schemas = [schema for schema in jit_get_schemas_for_operator(base) if _is_dispatched(schema)]
    matches = [schema for schema in schemas if schema.overload_name == overload]
    if matches:
        return matches[0]
    return schemas[0] if len(schemas) == 1 and not overload else None


def _is_dispatched(schema: Any) -> bool:
    """Return whether an overload takes tensors, unlike TorchScript's overloads (aten::add for two ints)."""
    try:
        dispatch_find_schema_or_throw(schema.name, schema.overload_name)
    except RuntimeError:
        return False
    return True


def _aten_target(name: str) -> Target | None:
    schema = _schema(name)
    if schema is None or any(argument.is_write and not argument.kwarg_only for argument in schema.arguments):
        return None  # an operator that mutates its arguments has no symbol
    signature = from_schema(schema)
    base = name.partition("::")[2].partition(".")[0]
    parameters = [parameter.name for parameter in signature.parameters if not parameter.out]
    for symbol in _spellings(base):
        ours = symbol_signature(symbol)
        names = _correspondence([parameter.name for parameter in ours.parameters], parameters)
        if names is not None:
            return Target(symbol, ours, names)
    return None


def _spellings(base: str) -> Iterator[Symbol]:
    """Return the torchlang symbols of the torch functions and the method of this name."""
    owners = (torch, torch.nn.functional, torch_nn_module, torch.special, torch.linalg)
    functions = [getattr(owner, base, None) for owner in owners]
    functions += [getattr(owner, base.removeprefix(owner.__name__.rpartition(".")[2] + "_"), None) for owner in owners]
    for spelling in [function for function in functions if callable(function)] + [base]:
        symbol = torchlang.find(spelling)
        if symbol is not None:
            yield symbol


def _correspondence(ours: list[str], theirs: list[str]) -> dict[str, str] | None:
    """Map forge's argument names to the operator's; aten names the first one self, torch input."""
    if not theirs or not ours or len(theirs) > len(ours):
        return None
    names = {ours[0]: theirs[0]} if {ours[0], theirs[0]} <= {"self", "input"} else {}
    names |= {name: name for name in ours if name in theirs}
    return names if set(names.values()) == set(theirs) else None


def make_checker(
    entry: KernelEntry, signature: Signature, target: Target, *, faster: bool = False
) -> Callable[..., Decision]:
    """Return the checker for `register_implementation`, which accepts a call or describes the first violated constraint
    of the kernel. faster: as for Checker."""
    check = Checker(entry, signature, faster=faster)
    ours, names = target.signature, target.names
    if ours == signature:

        def decide(*args: Any, **kwargs: Any) -> Decision:
            decision = check(*args, **kwargs)
            return True if decision is True else decline(str(decision))

        return decide
    unnamed = [parameter for parameter in ours.parameters if parameter.name not in names]

    def decide_renamed(*args: Any, **kwargs: Any) -> Decision:
        values = ours.bind(args, kwargs)
        for parameter in unnamed:
            if not is_default(values.get(parameter.name), parameter.default):
                return decline(f"{parameter.name} is given, but {signature.name} has none")
        decision = check.decide({names[name]: value for name, value in values.items() if name in names})
        return True if decision is True else decline(str(decision))

    return decide_renamed
