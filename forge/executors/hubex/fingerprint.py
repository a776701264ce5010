"""The fingerprint of a kernel: one hash of everything that can change its verdict."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from forge.executors.fingerprint import Fingerprint, fingerprint_of
from forge.executors.fingerprint.owners import register_owner
from forge.executors.fingerprint.walk import register_operators, register_visitor
from forge.executors.hubex import functions
from forge.executors.hubex.kernels import Kernel
from forge.hub import VerifiedKernel, content_of, verified_of
from forge.hub.manifest import KernelEntry


def fingerprint(kernel: Kernel) -> Fingerprint:
    """Return the hash of a kernel's entry, functions and reference."""
    about = ("kernel", kernel.origin.content, kernel.name, entry_text(kernel.entry), kernel.target.symbol.id)
    others = [each for each in (kernel.assumes, kernel.samples) if each is not None]
    code = kernel.function, kernel.forward, kernel.backward
    return fingerprint_of(*code, *_compared_with(kernel), *others, about=about)


def _compared_with(kernel: Kernel) -> tuple[Any, ...]:
    """Return the functions of a kernel's reference that are not torch's own."""
    function = kernel.target.function
    if function is None:
        return (kernel.pattern,)
    return function.reference, function.fake, function.operator if function.foreign else None


def entry_text(entry: KernelEntry) -> str:
    """Return an entry as text without its position in the manifest: the same text in every process."""
    unread = ("fn", "assumes_fn", "samples_fn", "mark", "grad")
    values = {field.name: getattr(entry, field.name) for field in fields(entry) if field.name not in unread}
    values["grad"] = {
        field.name: getattr(entry.grad, field.name) for field in fields(entry.grad) if not field.name.endswith("fn")
    }
    unsaid_before = ("mutates", "samples", "assumes", "keyed", "result")  # omitted if unset: older verdicts stay valid
    for name in unsaid_before:
        if not values[name]:
            del values[name]
    for name in ("mutates", "result"):
        if not values["grad"][name]:
            del values["grad"][name]
    values["optional"] = sorted(entry.optional)
    values["where"] = [condition.text for condition in entry.where]
    return repr(values)


class _Repositories:
    """The owner of the modules of repositories' files."""

    def owner_of(self, module: str) -> str | None:
        content = content_of(module)
        return None if content is None else f"repository {content}"

    def imports_of(self, module: str) -> Iterator[str]:
        """Yield the external modules that a repository's files import, as its policy allows."""
        verified = verified_of(module)
        for each in () if verified is None else (verified, *verified.depends):
            yield from _imports_from_elsewhere(each.content, each)


_elsewhere: dict[str, tuple[str, ...]] = {}


def _imports_from_elsewhere(content: str, verified: VerifiedKernel) -> tuple[str, ...]:
    """Return the modules that a repository's Python imports absolutely, without the standard library and torch."""
    if content not in _elsewhere:
        modules: set[str] = set()
        for file in verified.files.values():
            for node in ast.walk(ast.parse(file.content)) if file.content is not None else ():
                if isinstance(node, ast.Import):
                    modules.update(alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                    modules.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
        theirs = {*sys.stdlib_module_names, "torch", "forge"}
        _elsewhere[content] = tuple(sorted(name for name in modules if name.partition(".")[0] not in theirs))
    return _elsewhere[content]


def _parts_of_operator(name: str) -> tuple[Any, ...] | None:
    """Return the parts of an operator that a manifest declares, None for other operators."""
    function = functions.find_function(name)
    return None if function is None or function.foreign else (function.text, function.reference, function.fake)


register_owner(_Repositories())
register_operators(_parts_of_operator)
register_visitor(Kernel, lambda walk, kernel: walk.visit(kernel.function))
