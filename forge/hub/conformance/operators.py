"""The requirement on operators: all of a kernel's are in one namespace of torch.ops, which no other build uses."""

import ast
import re
from collections.abc import Iterator

from forge.hub.conformance.repository import Finding, Python, Repository
from forge.hub.import_graph import name_of

TORCHS_OWN = frozenset(
    "aten prims prim c10d _c10d_functional c10d_functional fsdp higher_order inductor onednn mkldnn mkl profiler "
    "quantized quantized_decomposed rngprims sparse static_runtime torch torchvision debugprims mkldnn_prepacked "
    "xnnpack _quantized tensorexpr symm_mem load_library loaded_libraries import_module".split()
)
REGISTERS = {"custom_op", "triton_op", "register_fake", "register_autograd", "register_kernel", "impl", "define"}
QUALIFIED = re.compile(r"(\w+)::\w+")


def op_namespace(repository: Repository) -> Iterator[Finding]:
    """Require that all operators are registered and called in torch.ops.<id>, and the id is not the plain name."""
    for variant in repository.variants:
        id, name = variant.value("id", str), variant.value("name", str)
        visited = set(TORCHS_OWN)
        for each in variant.python.values():
            for line, namespace in _namespaces(each):
                if namespace in visited:
                    continue
                visited.add(namespace)
                if id is not None and namespace != id:
                    text = f"torch.ops.{namespace} is not torch.ops.{id}, which is the id's"
                    yield variant.finding("op-namespace", text, each.path, line)
                elif name is not None and namespace.strip("_") == name.replace("-", "_"):
                    text = f"torch.ops.{namespace} is not unique to the build; append a part of the commit's hash"
                    yield variant.finding("op-namespace", text, each.path, line)


def _namespaces(python: Python) -> Iterator[tuple[int, str]]:
    """Yield (line, namespace) of each namespace that the code names: torch.ops.ns, Library("ns", …),
    custom_op("ns::op", …)."""
    for node in python.nodes:
        if isinstance(node, ast.Attribute) and _is_torch_ops(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            callee = name_of(node.func)
            first = node.args[0] if node.args else None
            text = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
            if text is None:
                continue
            qualified = QUALIFIED.match(text)
            if callee in REGISTERS and qualified:
                yield node.lineno, qualified[1]
            elif callee == "Library" and len(node.args) > 1:
                yield node.lineno, text


def _is_torch_ops(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "ops" and getattr(node.value, "id", None) == "torch"


REQUIREMENTS = (op_namespace,)
