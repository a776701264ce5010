"""The generated binding of ExecuTorch's C++ kernels, of the form `(context, …, out)`, to operators of torch.

A manifest that names a functions.yaml (`executorch`) beside sources (`build`) names its kernels as in C++. They are
compiled with torch's own tensors (ExecuTorch's ATen mode): kernel.h stands in for the headers that kernels include, and
the binding has an operator per kernel in the library's own namespace. The operator makes a context, calls the kernel,
and raises RuntimeError if the kernel reported a failure to the context.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forge.hub.manifest.model import Build, Manifest, OpEntry
from forge.hub.manifest.signatures import parsed_schema
from forge.hub.manifest.validate import bound_namespace, is_bound
from forge.torch_internals.dispatch import get_schema

FOLDER = "forge-executorch"
BINDING = f"{FOLDER}/binding.cpp"
HEADER = "forge_executorch.h"
HEADERS = (  # headers that kernels include; all are one
    "runtime/core/array_ref.h",
    "runtime/core/error.h",
    "runtime/core/exec_aten/exec_aten.h",
    "runtime/core/exec_aten/util/scalar_type_util.h",
    "runtime/core/exec_aten/util/tensor_util.h",
    "runtime/core/result.h",
    "runtime/core/span.h",
    "runtime/kernel/kernel_includes.h",
    "runtime/kernel/kernel_runtime_context.h",
    "runtime/platform/assert.h",
    "runtime/platform/compiler.h",
    "runtime/platform/log.h",
)

# by the type in a schema: the types that torch passes to an operator's function, and that the kernel takes
_TYPES = {
    "Tensor": ("const at::Tensor&", "const at::Tensor&"),
    "Tensor?": ("const std::optional<at::Tensor>&", "const std::optional<at::Tensor>&"),
    "Tensor[]": ("at::TensorList", "at::TensorList"),
    "Tensor?[]": ("const c10::List<std::optional<at::Tensor>>&", "at::ArrayRef<std::optional<at::Tensor>>"),
    "Scalar": ("const at::Scalar&", "const at::Scalar&"),
    "Scalar?": ("const std::optional<at::Scalar>&", "const std::optional<at::Scalar>&"),
    "int": ("int64_t", "int64_t"),
    "int?": ("std::optional<int64_t>", "std::optional<int64_t>"),
    "int[]": ("at::IntArrayRef", "at::IntArrayRef"),
    "int[]?": ("at::OptionalIntArrayRef", "at::OptionalIntArrayRef"),
    "float": ("double", "double"),
    "float?": ("std::optional<double>", "std::optional<double>"),
    "float[]": ("at::ArrayRef<double>", "at::ArrayRef<double>"),
    "float[]?": ("at::OptionalArrayRef<double>", "at::OptionalArrayRef<double>"),
    "bool": ("bool", "bool"),
    "bool?": ("std::optional<bool>", "std::optional<bool>"),
    "str": ("std::string_view", "std::string_view"),
    "str?": ("std::optional<std::string_view>", "std::optional<std::string_view>"),
    "ScalarType": ("at::ScalarType", "at::ScalarType"),
    "ScalarType?": ("std::optional<at::ScalarType>", "std::optional<at::ScalarType>"),
    "MemoryFormat": ("at::MemoryFormat", "at::MemoryFormat"),
    "MemoryFormat?": ("std::optional<at::MemoryFormat>", "std::optional<at::MemoryFormat>"),
}


class NotBound(ValueError):
    """The reason why a kernel cannot be bound."""


def files_of(manifest: Manifest) -> dict[str, bytes]:
    """Return the files to compile beside a manifest's own sources, by path: the binding and the headers, if any kernel
    needs one. Raises NotBound."""
    bound = _bound_kernels(manifest)
    if not bound:
        return {}
    include = "#pragma once\n#include <" + HEADER + ">\n"
    files = {f"{FOLDER}/executorch/{path}": include.encode() for path in HEADERS}
    files[f"{FOLDER}/{HEADER}"] = Path(__file__).with_name("kernel.h").read_bytes()
    files[BINDING] = _binding_source(manifest.library.name, bound).encode()
    return files


def with_binding(build: Build, files: Iterable[str]) -> Build:
    """Return a copy of the build with these files added to the sources."""
    if BINDING not in files:
        return build
    return Build(**{**vars(build), "cpp": (*build.cpp, BINDING), "include": (*build.include, FOLDER)})


@dataclass(frozen=True)
class _BoundKernel:
    """A kernel: its name in C++ (without `native`), its operator, and the operation's schema."""

    function: str
    operator: str
    schema: Any


def _bound_kernels(manifest: Manifest) -> list[_BoundKernel]:
    kernels: dict[str, _BoundKernel] = {}
    for op in manifest.ops:
        for entry in op.kernels:
            if is_bound(entry, manifest.library.name):
                name = str(entry.kernel_name).partition("::")[2]
                kernels[name] = _BoundKernel(entry.name.partition("#")[0], name, _schema(op))
    return list(kernels.values())


def _schema(op: OpEntry) -> Any:
    if op.schema is not None:
        return parsed_schema(op.schema, namespace="aten")
    base, _, overload = op.name.partition(".")
    return get_schema(base, overload)


# C++


def _binding_source(library: str, kernels: list[_BoundKernel]) -> str:
    parts = [_one(each) for each in kernels]
    declared = "\n".join(each["declaration"] for each in parts)
    wrapped = "\n".join(each["wrapper"] for each in parts)
    defined = "\n".join(each["definition"] for each in parts)
    return f"""\
// Generated: kernels of ExecuTorch as operators of torch.
#include <{HEADER}>
#include <torch/library.h>

{declared}

namespace {{
void check(const executorch::runtime::KernelRuntimeContext& context, const char* kernel) {{
  const auto state = context.failure_state();
  TORCH_CHECK(state == executorch::runtime::Error::Ok, kernel, ": ", executorch::runtime::to_string(state), ": ",
              executorch::runtime::last_message());
}}

{wrapped}
}}  // namespace

TORCH_LIBRARY({bound_namespace(library)}, m) {{
{defined}
}}
"""


def _one(kernel: _BoundKernel) -> Mapping[str, str]:
    """Return the declaration of a kernel, its calling function, and the definition of its operator."""
    schema, name = kernel.schema, kernel.operator
    inputs, types, call_arguments, before, schema_arguments = [], [], [], [], []
    keywords = False
    for i, argument in enumerate(schema.arguments):
        is_out = argument.alias_info is not None and argument.alias_info.is_write
        kind = _type_of(argument)
        if kind not in _TYPES or (is_out and kind != "Tensor"):
            raise NotBound(f"kernel {kernel.function}: {argument.name!r} is {kind}, which no binding is generated for")
        gets, takes = ("at::Tensor&", "at::Tensor&") if is_out else _TYPES[kind]
        inputs.append(f"{gets} a{i}")
        types.append(takes)
        call_arguments.append(f"a{i}")
        if gets != takes:
            before.append(f"  std::vector<std::optional<at::Tensor>> v{i}(a{i}.begin(), a{i}.end());\n")
            call_arguments[-1] = f"v{i}"
        schema_arguments += ["*"] if argument.kwarg_only and not keywords else []
        keywords = keywords or argument.kwarg_only
        schema_arguments.append(f"Tensor(a{i}!) {argument.name}" if is_out else f"{kind} {argument.name}")
    *spaces, function = _in_native(kernel.function)
    result = {0: "void", 1: "at::Tensor&"}.get(len(schema.returns))
    result = result or f"std::tuple<{', '.join(['at::Tensor&'] * len(schema.returns))}>"
    parameters = ", ".join(["executorch::runtime::KernelRuntimeContext&", *types])
    opened = " ".join(f"namespace {space} {{" for space in spaces)
    call = f"::{'::'.join([*spaces, function])}(context{''.join(f', {each}' for each in call_arguments)})"
    return {
        "declaration": f"{opened} {result} {function}({parameters}); {'}' * len(spaces)}",
        "wrapper": f"void call_{name}({', '.join(inputs)}) {{\n  executorch::runtime::KernelRuntimeContext context;\n"
        f"  executorch::runtime::last_message().clear();\n{''.join(before)}  {call};\n"
        f'  check(context, "{kernel.function}");\n}}\n',
        "definition": f'  m.def("{name}({", ".join(schema_arguments)}) -> ()");\n'
        f'  m.impl("{name}", c10::DispatchKey::CPU, &call_{name});',
    }


def _in_native(name: str) -> list[str]:
    """Return the namespaces and the name of a kernel's function: ExecuTorch keeps kernels in a namespace `native`
    inside the written one, which is `at` by default."""
    *spaces, function = name.split("::")
    spaces = spaces or ["at"]
    return [*spaces, *(() if spaces[-1:] == ["native"] else ("native",)), function]


def _type_of(argument: Any) -> str:
    """Return an argument's type as in a schema, without the lengths of lists."""
    return _type_text(str(argument.real_type))


def _type_text(text: str) -> str:
    for wrapper, suffix in (("Optional", "?"), ("List", "[]")):
        inner = re.fullmatch(rf"{wrapper}\[(.*)\]", text)
        if inner is not None:
            return _type_text(inner[1]) + suffix
    text = re.sub(r"\[\d+\]", "[]", text)
    return {"number": "Scalar", "number?": "Scalar?", "SymInt": "int"}.get(text, text)
