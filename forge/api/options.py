"""The options of forge.jit: checked, and resolved to a Config."""

import inspect
import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from forge.compiler.config import Config
from forge.debug.eager_check import CheckedTrace
from forge.debug.edited import apply_edits
from forge.executors.executor import Executor, FusionExecutor
from forge.executors.registry import resolve_executors, unknown
from forge.ir import check as require
from forge.ir.checks import check_flag, check_list
from forge.runtime.module_transforms import ModuleTransform
from forge.transforms.users import Transform

MEMORY = ("speed", "balanced", "smallest")
SELECT = ("order", "measured")
CHECK = (None, "eager", "regions")
NUMERICS = ("fast", "eager")
CUDA_GRAPHS = (True, False, "auto")
# torch.compile's modes, as values of options that are left at their defaults
MODES: dict[str | None, dict[str, Any]] = {
    None: {},
    "default": {},
    "reduce-overhead": {"cuda_graphs": True},
    "max-autotune": {"cuda_graphs": True, "select": "measured"},
    "max-autotune-no-cudagraphs": {"cuda_graphs": False, "select": "measured"},
}
CHECK_VARIABLE = "FORGE_CHECK"


# options of torch.compile that have another name here (docs/how-to/coming-from.md)
_OF_TORCH_COMPILE = {
    "backend": 'executors= says who runs calls; torch.compile(model, backend="forge") takes forge as the backend',
    "options": 'they are arguments of forge.jit; torch.compile(model, backend="forge", options={...}) takes them so',
    "disable": "a function that is not given to forge.jit runs in eager",
}
# options of forge.jit that a backend does not take
_OF_JIT = {
    **dict.fromkeys(("kernels", "layers", "allow_imports"), "forge.use_kernels gives kernels to torch.compile, too"),
    **dict.fromkeys(("fullgraph", "dynamic"), "give it to torch.compile itself"),
}


def refuse_unknown(caller: str, names: Iterable[str], options: Sequence[str]) -> None:
    """Raise TypeError for an unknown option, with similar names, or with forge's name for torch.compile's."""
    for name in names:
        what = unknown("option", name, options)
        for owner, remedies in (("torch.compile", _OF_TORCH_COMPILE), ("forge.jit", _OF_JIT)):
            if name in remedies:
                what = f"{name!r} is an option of {owner}; {remedies[name]}"
        require(name in options, lambda what=what: f"{caller}: {what}", TypeError)


def default_check(check: str | None) -> str | None:
    """Return the kind of check to run: `check`, or else the environment's FORGE_CHECK, or None."""
    return os.environ.get(CHECK_VARIABLE) or None if check is None else check


def resolve_options(  # noqa: PLR0913  the options of forge.jit
    executors: Sequence[str | Executor] | None = None,
    transforms: Sequence[Transform] = (),
    *,
    strict: bool = False,
    memory: str = "balanced",
    cache: bool = True,
    cuda_graphs: bool | str = "auto",
    freeze: bool = False,
    select: str = "order",
    numerics: str = "fast",
    check: str | None = None,
    edit: str | os.PathLike[str] | None = None,
    mode: str | None = None,
    first: Sequence[Executor] = (),
    is_for_a_file: bool = False,
) -> Config:
    """Return the Config of options of forge.jit, whose docstring describes them.

    first: executors that take priority over `executors`, such as kernels. is_for_a_file: programs run elsewhere, so
    that FORGE_CHECK does not apply.

    Raises:
        ValueError: For an unknown `memory`, `select`, `numerics`, `check` or `mode`, an unknown executor, and a fusion
            executor whose regions do not support the numerics.
        TypeError: For an option of another type.
    """
    check = check if is_for_a_file else default_check(check)
    for name, value, choices in (
        ("memory", memory, MEMORY),
        ("select", select, SELECT),
        ("check", check, CHECK),
        ("numerics", numerics, NUMERICS),
        ("mode", mode, tuple(MODES)),
    ):
        _require_one_of(name, value, choices)
    cuda_graphs = MODES[mode].get("cuda_graphs", cuda_graphs) if cuda_graphs == "auto" else cuda_graphs
    select = MODES[mode].get("select", select) if select == "order" else select
    _require(isinstance(edit, (str, os.PathLike, type(None))), f"edit is {edit!r}, but must be a folder's path")
    for name, flag in {"strict": strict, "cache": cache, "freeze": freeze}.items():
        check_flag(flag, f"forge.jit: {name}")
    check_flag(cuda_graphs, "forge.jit: cuda_graphs", CUDA_GRAPHS)
    check_transforms(transforms)
    for transform in transforms:
        replaces = isinstance(transform, ModuleTransform)
        _require(not replaces, f"{type(transform).__name__} replaces parameters, which forge.jit(module) alone can do")
    resolved = (*first, *resolve_executors(executors))
    if numerics == "eager":
        resolved = tuple(map(_round_as_eager, resolved))
    if check == "regions":
        resolved = tuple(each.with_region_checks() if isinstance(each, FusionExecutor) else each for each in resolved)
    if select == "measured":  # last, so that the indices of the others stay the same
        products = [each.product_executor() for each in resolved if isinstance(each, FusionExecutor)]
        resolved = (*resolved, *[each for each in products if each is not None])
    is_plain = check != "eager" and edit is None
    return Config(
        executors=resolved,
        transforms=tuple(transforms),
        strict=strict,
        memory=memory,
        cache=cache and is_plain,
        cuda_graphs=cuda_graphs if is_plain else False,
        records_graphs=cuda_graphs is True and is_plain,
        freeze=freeze,
        select=select,
        numerics=numerics,
        checks=check is not None,
        comparison=CheckedTrace if check == "eager" else None,
        codegen=None if edit is None else partial(apply_edits, folder=edit),
    )


CONFIG_OPTIONS = [
    name for name in inspect.signature(resolve_options).parameters if name not in ("first", "is_for_a_file")
]


def check_transforms(transforms: Any) -> None:
    """Raise TypeError unless transforms are a list of functions and module transforms."""
    check_list(transforms, "forge.jit: transforms", "functions from a Trace to a Trace")
    for transform in transforms:
        is_class = isinstance(transform, type) and issubclass(transform, ModuleTransform)
        _require(not is_class, f"a transform is the class {transform!r}, but must be an object of it")
        is_one = callable(transform) or isinstance(transform, ModuleTransform)
        _require(is_one, f"a transform is {transform!r}, but must be a function or a forge.ModuleTransform")


def _require(holds: bool, problem: str) -> None:
    require(holds, lambda: f"forge.jit: {problem}", TypeError)


def _require_one_of(name: str, value: Any, choices: Sequence[str | None]) -> None:
    listed = ", ".join(map(str, choices))
    require(value in choices, lambda: f"forge.jit: {name} is {value!r}, but must be one of {listed}")


def _round_as_eager(executor: Executor) -> Executor:
    """Return the executor for numerics="eager". Raises ValueError for one that cannot round as eager does."""
    rounding = executor.with_eager_numerics()
    if rounding is None:
        raise ValueError(
            f"forge.jit: numerics is 'eager', but executor {executor.name} has no regions that round as eager does: "
            "its with_eager_numerics() returns None"
        )
    return rounding
