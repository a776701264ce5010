"""The arguments of a kernel's call, and checks that its function accepts them."""

import inspect
import keyword
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from forge.hub.errors import HubError
from forge.hub.manifest.model import Argument, KernelArgument, KernelEntry, Signature
from forge.torch_internals.dispatch import find_schema, schema_of

Find = Callable[[str], Any]


def kernel_problems(entry: KernelEntry, signature: Signature, find: Find) -> list[str]:
    """Return the reasons why a kernel, its forward or its backward cannot be called: it is not found, or its signature
    does not accept its arguments."""
    grad = entry.grad
    own = called_with(entry, signature)
    saving = (own[0], [*own[1], *(grad.saves if entry.out else ())])
    functions = (
        (entry.kernel_name, entry.fn, own if grad.forward else saving),
        (grad.forward, grad.forward_fn, saving),
        (grad.kernel_name, grad.fn, _backward_called_with(entry, signature)),
    )
    advice = ": args says what it is given"
    problems = []
    for name, function, arguments in functions:
        if name is not None or function is not None:
            problems += function_problems(f"kernel {(name or entry.name)!r}", name, function, arguments, find, advice)
    return problems


def function_problems(
    label: str,
    name: str | None,
    function: Callable | None,
    arguments: tuple[list[str], list[str]],
    find: Find,
    advice: str = "",
) -> list[str]:
    """Return the reasons why a function cannot be called so: it is not found, or its signature does not accept the
    arguments. advice: what follows the arguments of a call that has too many."""
    try:
        function = function or find(name or "")
    except Exception as error:
        return [f"{label} not found: {describe_error(error)}"]
    return [f"{label}: {text}" for text in call_problems(function, *arguments, advice)]


def called_with(entry: KernelEntry, signature: Signature) -> tuple[list[str], list[str]]:
    """Return the positional arguments of a kernel (described by role), and the names of its keyword arguments."""
    if entry.args is None:
        positional, keywords = own_arguments(signature)
    else:
        positional, keywords = _split_args(entry.args)
    return _with_outs(positional, keywords, entry.out)


def _backward_called_with(entry: KernelEntry, signature: Signature) -> tuple[list[str], list[str]]:
    """Return the same for its gradient kernel."""
    if entry.grad.args is not None:
        positional, keywords = _split_args(entry.grad.args)
    else:
        positional, keywords = own_arguments(signature) if entry.args is None else _split_args(entry.args)
        positional = ["grad_output"] * (signature.returns or 1) + positional
        keywords = [*keywords, *entry.grad.saves]
    return _with_outs(positional, keywords, entry.grad.out)


def own_arguments(signature: Signature) -> tuple[list[str], list[str]]:
    """Return the arguments that a kernel gets by position and by keyword if it does not say: the operator's, without
    torch's private ones (`_stacklevel`); those that follow one of these are passed by keyword."""
    ours = [parameter for parameter in signature.parameters if not parameter.out]
    first = list(takewhile(lambda each: not (each.keyword_only or each.name.startswith("_")), ours))
    others = [each.name for each in ours[len(first) :] if not each.name.startswith("_")]
    return [each.name for each in first], others


def _split_args(args: tuple[KernelArgument, ...]) -> tuple[list[str], list[str]]:
    positional = [_what(argument.value) for argument in args if argument.parameter is None]
    return positional, [argument.parameter for argument in args if argument.parameter is not None]


def _with_outs(positional: list[str], keywords: list[str], outs: tuple[str | int, ...]) -> tuple[list[str], list[str]]:
    for out in outs:
        if isinstance(out, int):
            positional.insert(out, f"out {out}")
        else:
            keywords.append(out)
    return positional, keywords


def _what(value: Any) -> str:
    return value.name if isinstance(value, Argument) else repr(value.value)


def describe_error(error: Exception) -> str:
    """Return an exception as one line: all lines of a HubError, the first line of any other."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if isinstance(error, HubError) and len(lines) > 1:
        return f"{lines[0]} {'; '.join(lines[1:])}"
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def call_problems(function: Callable, positional: list[str], keywords: list[str], advice: str = "") -> list[str]:
    """Return the problems of calling a kernel with these positional arguments (described by role) and these keyword
    arguments."""
    parameters = _kernel_parameters(function)
    if parameters is None:
        return []
    takes = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    any_position = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    surplus = [] if any_position else _surplus(positional, [p.name for p in takes])
    refused = [] if any_name else [name for name in keywords if name not in by_name]
    filled = {p.name for p in takes[: len(positional)]} | set(keywords)
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in filled
    ]
    duplicates = [p.name for p in takes[: len(positional)] if p.name in keywords]
    by_position = ", ".join(positional)
    takes_in_words = ", ".join([*(p.name for p in takes), *(f"{p.name}=" for p in parameters if p not in takes)])
    call = f"; it is called with ({by_position}), and takes ({takes_in_words}){advice}"
    return [
        *([f"its signature does not accept {', '.join(map(repr, surplus))}{call}"] if surplus else []),
        *[f"its signature does not accept {name!r}" for name in refused],
        *[f"its signature needs {name!r}, which it is not given" for name in missing],
        *[f"it is given {name!r} twice" for name in duplicates],
    ]


def _surplus(positional: list[str], takes: list[str]) -> list[str]:
    """Return the positional arguments that a function does not accept: by their names if it has parameters of the
    others' names, else the last ones."""
    unnamed = [name for name in positional if name not in takes]
    count = len(positional) - len(takes)
    return unnamed if len(unnamed) == count else positional[len(takes) :]


def _kernel_parameters(function: Callable) -> list[inspect.Parameter] | None:
    """Return the parameters of a Python function or of a torch operator; None if they are not known."""
    schema = find_schema(function)
    if schema is None and hasattr(function, "overloads"):
        overloads = function.overloads()
        schema = schema_of(getattr(function, overloads[0])) if len(overloads) == 1 else None
        if schema is None:
            return None
    if schema is not None:
        return [_schema_parameter(argument) for argument in schema.arguments]
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return None


def _schema_parameter(argument: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
    name = argument.name + "_" if keyword.iskeyword(argument.name) else argument.name
    return inspect.Parameter(name, kind, default=default)
