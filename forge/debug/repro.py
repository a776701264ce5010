"""forge.repro: a standalone script that runs a compiled graph without its model."""

import os
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from forge.capture.handles import JitHandle, handle_of
from forge.compiler.report import CompileReport
from forge.compiler.standalone import claim
from forge.executors.torchex.core import torchex
from forge.ir import BoundSymbol, NumberProxy, Proxy, TensorProxy, Trace, check
from forge.ir.printing import quantity
from forge.ir.proxies import Dim, hint_of
from forge.ir.pytree import proxies
from forge.ir.strides import contiguous

_LARGEST = 256  # the most elements of a constant that is written as a literal
_SCRIPT = '''"""{name}: {calls} calls of torch that forge compiled, in the order in which they were recorded.

Written by forge.repro, with torch {torch} and Python {python}. The inputs have the shapes, dtypes, strides and devices
of those that it was compiled for, and other values: put in your own where they matter.{left_out}
"""

{imports}

import forge

OPTIONS = {options}


{program}

def inputs():
    torch.manual_seed(0)
    return [
{inputs}
    ]


def run(function):
    """Return the results of the function, and the gradients of their sum."""
    given = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs()]
    results = [x for x in function(*given) if isinstance(x, torch.Tensor)]
    wanted = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
    flowing = [x.sum() for x in results if x.requires_grad]
    gradients = torch.autograd.grad(sum(flowing), wanted, allow_unused=True) if flowing and wanted else ()
    return [*results, *gradients]


if __name__ == "__main__":
    jitted = forge.jit({entry}, **OPTIONS)
    for place, (ours, eager) in enumerate(zip(run(jitted), run({entry}), strict=True)):
        if ours is not None and eager is not None and eager.numel():
            far = (ours.double() - eager.double()).abs().max().item()
            print(f"value {{place}}: {{tuple(eager.shape)}} {{eager.dtype}}, largest difference from eager {{far:.3g}}")
    print(forge.explain(jitted))
'''


def repro(jitted: Any, path: str | os.PathLike[str], *, graph: int = 0) -> Path:
    """Write a script that reproduces one graph: its forward and backward by forge and in eager, with their difference.

    The script also prints forge.explain. Options of forge.jit that have no source form, such as executor objects,
    are left out; a warning and the head of the script name them.

    Args:
        jitted: A result of forge.jit, after a call.
        path: The file to write.
        graph: The index of the graph.

    Returns:
        The path.

    Raises:
        TypeError: If `jitted` is not a result of forge.jit.
        ValueError: If the graph does not exist, or calls or takes objects that have no source form.
    """
    handle = handle_of(jitted, "forge.repro")
    compiled = handle.reports
    check(bool(compiled), lambda: f"forge.repro: {handle.name} has compiled nothing yet: call it first")
    check(
        0 <= graph < len(compiled),
        lambda: f"forge.repro: graph is {graph}, but {handle.name} has {quantity(len(compiled), 'graph')}, from 0",
    )
    path = Path(path)
    path.write_text(_script(handle, compiled[graph]))
    return path


def _script(handle: JitHandle, report: CompileReport) -> str:
    check(
        not report.shortened and bool(report.traces),
        lambda: "forge.repro: what was recorded was not kept; FORGE_KEEP_STAGES=1 and FORGE_CACHE=0 keep it",
    )
    trace = _of_torch(report.traces[0])
    lines = trace.show().splitlines()
    others = [line for line in lines if "forge.ir.printing.printed_object(" in line]
    check(
        not others,
        lambda: f"forge.repro: {others[0].partition(' = ')[0]} is an object of the program that has no literal",
    )
    results = proxies([bound.output for bound in trace.bound_symbols])
    numbers = [proxy for proxy in results if isinstance(proxy, NumberProxy)]
    check(
        not numbers,
        lambda: f"forge.repro: {handle.name} reads a number from a tensor, {numbers[0]}, as it does under dynamic=True",
    )
    imports = {"import torch", *(line for line in lines if line.startswith("import "))}
    if any(bound.symbol.id.startswith("operator.") for bound in trace.bound_symbols):
        imports.add("import operator")
    start = next(i for i, line in enumerate(lines) if line.startswith("def "))
    options = dict(_options(handle))
    left_out = list(_left_out(handle, options))
    if left_out:
        advice = "add them where they matter"
        warnings.warn(f"forge.repro: the script leaves out {', '.join(left_out)}: {advice}", stacklevel=3)
    return _SCRIPT.format(
        name=handle.name,
        calls=len(trace.bound_symbols),
        torch=torch.__version__,
        python=platform.python_version(),
        imports="\n".join(sorted(imports)),
        options=repr(options),
        left_out=f"\n\nLeft out of forge.jit's options: {', '.join(left_out)}." if left_out else "",
        program="\n".join([f"def {trace.name}({', '.join(trace.input_names)}):", *lines[start + 1 :], ""]),
        inputs="\n".join(f"        {_input(proxy, report.traces[0])}," for proxy in trace.inputs),
        entry=trace.name,
    )


def _of_torch(trace: Trace) -> Trace:
    """Return the trace with all calls run by torch, and with the values that it reads besides its inputs as inputs."""
    read = {name for bound in trace.bound_symbols for name in bound.inputs}.union(trace.output_names)
    constants = [trace.constant_proxy(name) for name in trace.constants if name in read]
    new = trace.derive("recorded", [], inputs=[*trace.inputs, *constants])
    for bound in trace.bound_symbols:
        new.bound_symbols += [bound] if _is_plain(bound.symbol.id) else _by_torch(trace, bound)
    new.constants.clear()
    return new


def _is_plain(name: str) -> bool:
    """Return whether a name is that of a function of Python or torch that returns its result, and is not in-place."""
    return name.partition(".")[0] in ("torch", "operator") and name != "operator.setitem" and not name.endswith("_")


def _by_torch(trace: Trace, bound: BoundSymbol) -> list[BoundSymbol]:
    alone = trace.derive("alone", [bound], output=bound.output)
    return claim(alone, [torchex])[0].bound_symbols


def _options(handle: JitHandle) -> Iterator[tuple[str, Any]]:
    """Yield the options of forge.jit that can be written as code."""
    keywords = handle.again.keywords if handle.again is not None else {}
    for name in ("memory", "select", "numerics", "dynamic"):
        if keywords.get(name) is not None:
            yield name, keywords[name]
    executors = keywords.get("executors")
    if executors is not None and all(isinstance(each, str) for each in executors):
        yield "executors", list(executors)
    kernels = [str(each) for each in keywords.get("kernels") or () if isinstance(each, (str, Path))]
    if kernels:
        yield "kernels", kernels


def _left_out(handle: JitHandle, options: dict[str, Any]) -> Iterator[str]:
    """Yield the options that affect execution and cannot be written in full, each with the missing part."""
    keywords = handle.again.keywords if handle.again is not None else {}
    for name in ("executors", "transforms", "kernels", "layers"):
        value = keywords.get(name)
        if not value or value == options.get(name):
            continue
        every = value if isinstance(value, (list, tuple)) else [value]
        missing = [_label(each) for each in every if each != "torch" and str(each) not in options.get(name, ())]
        if missing:
            yield f"{name} ({', '.join(missing)})"
    for name in ("freeze", "cuda_graphs", "check", "edit"):
        if keywords.get(name) and keywords[name] != "auto":
            yield f"{name}={_label(keywords[name])}"


def _label(value: Any) -> str:
    """Return a short label of a value: its name, else its type."""
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    text = name if isinstance(name, str) else repr(value) if isinstance(value, (str, bool, Path)) else None
    return " ".join((text or f"a {type(value).__name__}").replace('"""', "").replace("\\", "/").split())


def _input(proxy: Proxy, recorded: Trace) -> str:
    """Return a line of Python that makes a value for an input."""
    if isinstance(proxy, NumberProxy):
        return repr(hint_of(cast(Dim, proxy.value)))  # for a number that is not symbolic, its value
    assert isinstance(proxy, TensorProxy)
    constant = recorded.constants.get(proxy.name)
    if constant is not None and constant.numel() <= _LARGEST and not constant.dtype.is_complex:
        return f"torch.tensor({constant.tolist()!r}, dtype={constant.dtype}, device={str(constant.device)!r})"
    shape = tuple(map(hint_of, proxy.shape))
    strides = contiguous(shape) if proxy.strides is None else tuple(map(hint_of, proxy.strides))
    where = f"dtype={proxy.dtype}, device={str(proxy.device)!r}"
    expression = f"torch.empty({shape}, {where})"
    if strides != contiguous(shape):
        expression = f"torch.empty_strided({shape}, {strides}, {where})"
    floats = proxy.dtype.is_floating_point or proxy.dtype.is_complex
    filled = f"{expression}.{'normal_()' if floats else 'zero_()'}"
    return f"{filled}.requires_grad_()" if proxy.requires_grad and floats else filled
