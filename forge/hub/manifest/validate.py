"""From a parsed document to a Manifest: everything is checked, and every problem reported, before anything is used."""

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from forge.hub.compat import library
from forge.hub.errors import HubError
from forge.hub.manifest import kernels, signatures
from forge.hub.manifest.aliases import Aliases, read_aliases
from forge.hub.manifest.errors import Mark, Problems, did_you_mean
from forge.hub.manifest.fields import Fields, Reader, constant
from forge.hub.manifest.model import (
    Argument,
    Build,
    Device,
    Given,
    KernelEntry,
    Library,
    Manifest,
    OpEntry,
    Requires,
    Resolver,
    Signature,
)
from forge.hub.manifest.ordering import duplicates
from forge.hub.manifest.parse import Document, ListNode, MappingNode, Node, parse, parsed, read_document

VERSION = 1
KEYS = ("forge_kernels", "library", "requires", "build", "executorch", "ops")
OP_KEYS = (
    "op",
    "func",
    "pattern",
    "kernels",
    "type_alias",
    "dim_order_alias",
    "fake",
    "reference",
    "replace",
)
EXECUTORCH_OP_KEYS = ("op", "func", "kernels", "type_alias", "dim_order_alias", "dispatch")
# the dispatch keys under which an entry may name its kernel, and the devices that they are
DISPATCH = {
    "CPU": ("cpu",),
    "CUDA": ("cuda",),
    "CPU, CUDA": ("cpu", "cuda"),
    "CompositeExplicitAutograd": (),
    "CompositeImplicitAutograd": (),
}
# what torch's native_functions.yaml adds to an entry, and a functions.yaml may carry along
NATIVE_FUNCTION_KEYS = (
    "variants",
    "tags",
    "namespace",
    "structured",
    "structured_delegate",
    "structured_inherits",
    "precomputed",
    "ufunc_inner_loop",
    "device_check",
    "device_guard",
    "cpp_no_default_args",
    "python_module",
    "category_override",
    "manual_cpp_binding",
    "manual_kernel_registration",
    "use_const_ref_for_mutable_tensors",
    "autogen",
)
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_PATTERN = re.compile(r"[A-Za-z_]\w*|python:\.*[\w.]*:[A-Za-z_][\w.]*")
_TARGETS = ("op", "func", "pattern")
NO_META = "has neither 'fake' nor 'reference', so that its results are not known before it runs; give it one"

Find = Callable[[str], Any]


def read_manifest(
    path: Path | str,
    resolver: Resolver,
    *,
    find: Find | None = None,
    with_sources: bool = True,
    content: bytes | None = None,
) -> Manifest:
    """The manifest in a file. Raises ManifestError with every problem; see validate.

    content: what was read of the file before.
    with_sources: whether the sources of `build` lie beside it; beside a prebuilt variant they do not.
    """
    path = Path(path)
    document = read_document(path) if content is None else parsed(content, str(path))
    return validate(document, resolver, find=find, folder=path.parent if with_sources else None)


def parse_manifest(
    text: str | bytes, resolver: Resolver, *, file: str = "manifest", find: Find | None = None
) -> Manifest:
    """The manifest in a text. Raises ManifestError with every problem; see validate."""
    return validate(parse(text, file), resolver, find=find)


def validate(
    document: Document, resolver: Resolver, *, find: Find | None = None, folder: Path | None = None
) -> Manifest:
    """The manifest that a document holds: forge's dialect, or ExecuTorch's functions.yaml (a list).

    resolver: knows the operators. find: gives the function that a kernel's or pattern's name means, or raises; without
    it nothing is imported, kernels are not looked for, and a pattern's arguments are not checked. folder: where the
    sources of `build` must be. Raises ManifestError with every problem.
    """
    problems = Problems()
    problems.found.extend(document.problems)
    reader = _Manifest(document, problems, resolver, find, folder)
    manifest = None
    if document.root is not None:
        manifest = reader.read(document.root)
    elif not document.problems:
        problems.add(Mark(document.file, 1, 1), "the manifest is empty; it begins with forge_kernels: 1")
    problems.raise_any()
    assert manifest is not None, "a manifest without problems was read"
    return manifest


class _Manifest:
    """Reads a document's root."""

    def __init__(
        self, document: Document, problems: Problems, resolver: Resolver, find: Find | None, folder: Path | None
    ) -> None:
        self.document = document
        self.problems = problems
        self.reader = Reader(problems)
        self.resolver = resolver
        self.find = find
        self.folder = folder
        self.library = Library("")
        self.functions: dict[str, Signature] = {}
        self.compiled = False

    def read(self, root: Node) -> Manifest | None:
        if isinstance(root, ListNode):
            self.library = Library(Path(self.document.file).stem)
            ops = _named_apart(self._ops(root, True))
            return self._finished(Manifest(self.document.file, "executorch", self.library, ops))
        required = ("forge_kernels", "library", *(() if _has(root, "executorch") else ("ops",)))
        fields = self.reader.fields(root, "the manifest", KEYS, required=required)
        if fields is None:
            return None
        self._version(fields)
        self.library = self._library(fields.get("library"))
        ops = self._ops(fields.get("ops"), False)
        requires, build = self._requires(fields.get("requires")), self._build(fields.get("build"))
        executorch = self._executorch(fields.get("executorch"), bool(build.cpp))
        return self._finished(Manifest(self.document.file, "forge", self.library, ops + executorch, requires, build))

    def _finished(self, manifest: Manifest) -> Manifest:
        by_op: dict[str, list[KernelEntry]] = {}
        for kernel in manifest.kernels:
            by_op.setdefault(kernel.op, []).append(kernel)
        for entries in by_op.values():
            self.problems.found.extend(duplicates(entries))
        return manifest

    # the head

    def _version(self, fields: Fields) -> None:
        node = fields.get("forge_kernels")
        if node is not None and (type(constant(node)) is not int or constant(node) != VERSION):
            self.reader.no(node, "forge_kernels", f"{VERSION}, the version of manifests that this forge reads")

    def _library(self, node: Node | None) -> Library:
        fields = None if node is None else self.reader.fields(node, "library", ("name", "priority"), required=("name",))
        if fields is None:
            return Library("")
        wanted = "letters, digits, '_', '-' and '.', such as acme.norms"
        name = self.reader.matching(fields.get("name"), "library name", _NAME, wanted)
        return Library(name or "", self.reader.integer(fields.get("priority"), "library priority") or 0)

    def _requires(self, node: Node | None) -> Requires:
        fields = None if node is None else self.reader.fields(node, "requires", ("torch", "python"))
        if fields is None:
            return Requires()
        torch_node, python = fields.get("torch"), []
        text = self.reader.text(torch_node, "requires torch")
        specifiers = library("packaging.specifiers")
        try:
            specifiers.SpecifierSet(text or "")
        except specifiers.InvalidSpecifier:
            self.reader.no(torch_node, "requires torch", "a version range such as '>=2.11'")
        for item in self.reader.one_or_more(fields.get("python")):
            package = self.reader.text(item, "requires python")
            if package is not None and self._is_requirement(package, item):
                python.append(package)
        return Requires(text or "", tuple(python))

    def _is_requirement(self, text: str, node: Node) -> bool:
        requirements = library("packaging.requirements")
        try:
            valid = not requirements.Requirement(text).url
        except requirements.InvalidRequirement:
            valid = False
        if not valid:
            self.reader.no(node, "requires python", "packages such as einops or 'einops>=0.7'")
        return valid

    def _build(self, node: Node | None) -> Build:
        names = tuple(Build.__dataclass_fields__)
        fields = None if node is None else self.reader.fields(node, "build", names)
        if fields is None:
            return Build()
        found = {name: self.reader.texts(fields.get(name), f"build {name}") for name in names}
        for name in ("cpp", "cuda", "include"):
            for item in self.reader.one_or_more(fields.get(name)):
                self._check_path(item, name)
        return Build(**found)

    def _check_path(self, node: Node, key: str) -> None:
        """Sources lie in the manifest's own folder."""
        text = constant(node)
        if not isinstance(text, str):
            return
        label = key if key == "executorch" else f"build {key}"
        absolute = PurePosixPath(text).is_absolute() or PureWindowsPath(text).anchor or "\0" in text
        if absolute or ".." in re.split(r"[/\\]", text):
            self.problems.add(node.mark, f"{label} {text!r} must be a path inside of the manifest's folder")
            return
        if self.folder is None:
            return
        base, path = os.path.realpath(self.folder), os.path.realpath(self.folder / text)
        if os.path.commonpath([base, path]) != base:
            self.problems.add(node.mark, f"{label} {text!r} is a link out of the manifest's folder")
        elif not (os.path.isdir(path) if key == "include" else os.path.isfile(path)):
            near = did_you_mean(text, _files_beside(self.folder, text))
            self.problems.add(node.mark, f"{label} {text!r} does not exist in {self.folder}{near}")

    # ExecuTorch's files

    def _executorch(self, node: Node | None, compiled: bool) -> tuple[OpEntry, ...]:
        """The entries of each functions.yaml that is named, in order; of kernels that are compiled, the binding's
        operators are what is called."""
        self.compiled = compiled
        found: list[OpEntry] = []
        for item in self.reader.one_or_more(node):
            text = self.reader.text(item, "executorch")
            if text is None:
                continue
            if self.folder is None:
                self.problems.add(item.mark, "executorch: its files lie beside sources, in a manifest that is built")
                continue
            before = len(self.problems.found)
            self._check_path(item, "executorch")
            if len(self.problems.found) == before:
                found += self._functions(self.folder / text)
        return _named_apart(tuple(found))

    def _functions(self, path: Path) -> tuple[OpEntry, ...]:
        document = read_document(path)
        self.problems.found.extend(document.problems)
        if isinstance(document.root, ListNode):
            return self._ops(document.root, True)
        if not document.problems:
            mark = Mark(document.file, 1, 1)
            self.problems.add(mark, "is no functions.yaml, which is a list of entries that begin with '- op: …'")
        return ()

    def _functional(self, signature: Signature) -> Signature | None:
        """The operator that an out-variant computes, where there is one with the same arguments."""
        wanted = [p.name for p in signature.parameters if not p.out]
        base, _, overload = signature.name.partition(".")
        named = overload.removesuffix("out").rstrip("_")
        for name in (f"{base}.{named}" if named else base, base):
            found = self.functions.get(name) or self.resolver.resolve(name)
            if (
                found is not None
                and [p.name for p in found.parameters] == wanted
                and len(wanted) < len(signature.parameters)
            ):
                return found
        return None

    # operators

    def _ops(self, node: Node | None, executorch: bool) -> tuple[OpEntry, ...]:
        items = self.reader.items(node, "ops", "a list of entries that begin with '- op: …'")
        found = [self._op(item, index, executorch) for index, item in enumerate(items)]
        return tuple(entry for entry in found if entry is not None)

    def _op(self, node: Node, index: int, executorch: bool) -> OpEntry | None:
        known = EXECUTORCH_OP_KEYS if executorch else OP_KEYS
        ignored = NATIVE_FUNCTION_KEYS if executorch else ()
        fields = self.reader.fields(node, f"ops[{index}]", known, ignored=ignored)
        if fields is None:
            return None
        given = [kind for kind in _TARGETS if fields.get(kind) is not None]
        if len(given) != 1:
            wanted = "exactly one of 'op', 'func' and 'pattern' is required"
            self.problems.add(fields.mark, f"{wanted}{'; given: ' + ', '.join(given) if given else ''}")
        if executorch and fields.get("kernels") is None and fields.get("dispatch") is None and not fields.get("func"):
            return self._selected(fields)
        aliases = read_aliases(self.reader, fields.get("type_alias"), fields.get("dim_order_alias"))
        kind = given[0] if len(given) == 1 else None
        name, signature = self._target(kind, fields, executorch)
        functional = self._functional(signature) if executorch and kind == "func" and signature is not None else None
        if functional is not None:  # a kernel of it, which writes to memory that it is given
            name = functional.name
        schema = self.reader.text(fields.get("func"), "func") if kind == "func" else None
        replaces = self.reader.boolean(fields.get("replace"), "replace")
        entry_kernels = self._kernels(fields, kind or "op", name, signature, aliases, executorch)
        if kind == "func" and signature is not None and not executorch:
            self._check_func(fields, signature)
        if functional is not None:
            outs = [p.name for p in signature.parameters if p.out]
            entry_kernels = tuple(_of_functional(each, outs) for each in entry_kernels)
            kind, signature = "op", functional
        return OpEntry(
            kind=kind or "op",
            name=name or "",
            signature=signature,
            kernels=tuple(dataclasses.replace(each, replaces=replaces) for each in entry_kernels),
            schema=schema,
            fake=self._of_func("fake", fields, kind),
            reference=self._of_func("reference", fields, kind),
            replace=replaces,
            mark=fields.mark,
        )

    def _selected(self, fields: Fields) -> OpEntry | None:
        """An ExecuTorch entry that only selects an operator; one that this torch does not have is passed over."""
        text = self.reader.text(fields.get("op"), "op")
        name = None if text is None else text if "::" in text else f"aten::{text}"
        signature = None if name is None else self.resolver.resolve(name)
        return None if signature is None else OpEntry("op", signature.name, signature, (), mark=fields.mark)

    def _of_func(self, key: str, fields: Fields, kind: str | None) -> str | None:
        node = fields.get(key)
        if node is not None and kind in ("op", "pattern"):
            self.problems.add(fields.mark_of(key), f"{key!r} belongs to a 'func': an {kind} has it already")
            return None
        return self.reader.matching(node, key, kernels.KERNEL_NAME, kernels.KERNEL_NAME_FORMS)

    def _check_func(self, fields: Fields, signature: Signature) -> None:
        """That a new operator's results are known without running it, by functions that there are."""
        given = [key for key in ("fake", "reference") if fields.get(key) is not None]
        if self.find is None:
            return
        if not given and self.resolver.resolve(signature.name) is None:
            self.problems.add(fields.mark_of("func"), f"func {signature.name} {NO_META}")
        for key in given:
            node = fields.get(key)
            text = constant(node)
            if isinstance(text, str):
                for problem in _function_problems(f"{key} {text!r}", text, None, _own_arguments(signature), self.find):
                    self.problems.add(node.mark, problem)

    def _target(self, kind: str | None, fields: Fields, executorch: bool) -> tuple[str | None, Signature | None]:
        """The canonical name of what an entry implements, and its signature."""
        if kind is None:
            return None, None
        node = fields.get(kind)
        text = self.reader.text(node, kind)
        if text is None:
            return None, None
        read = {"op": self._existing, "func": self._declared, "pattern": self._pattern}[kind]
        signature = read(text.strip(), node, executorch)
        name = signature.name if signature is not None else text.strip() if kind == "pattern" else None
        return name, signature

    def _existing(self, text: str, node: Node, executorch: bool) -> Signature | None:
        name = f"aten::{text}" if executorch and "::" not in text else text
        signature = self.functions.get(name) or self.resolver.resolve(name)
        if signature is None:
            near = did_you_mean(name, (*self.resolver.names(), *self.functions))
            if not near and "::" not in text and self.resolver.resolve(f"aten::{text}"):
                near = f"; did you mean 'aten::{text}'?"
            self.problems.add(node.mark, f"unknown operator {name!r}{near}")
        return signature

    def _declared(self, text: str, node: Node, executorch: bool) -> Signature | None:
        try:
            signature = signatures.parse_schema(text, namespace="aten" if executorch else None)
        except signatures.InvalidSchema as error:
            self.problems.add(node.mark, str(error))
            return None
        if signature.name in self.functions:
            self.problems.add(node.mark, f"func {signature.name!r} is declared twice")
            return None
        self.functions[signature.name] = signature
        return signature

    def _pattern(self, text: str, node: Node, executorch: bool) -> Signature | None:
        if not _PATTERN.fullmatch(text):
            self.reader.no(node, "pattern", "the name of a pattern, or 'python:module:function'")
            return None
        if not text.startswith("python:"):
            signature = self.resolver.resolve(f"pattern:{text}")
            if signature is None:
                known = [name.removeprefix("pattern:") for name in self.resolver.names() if name.startswith("pattern:")]
                near = did_you_mean(text, known) or f"; known: {', '.join(known) or 'none'}, or python:module:function"
                self.problems.add(node.mark, f"unknown pattern {text!r}{near}")
            return signature
        if self.find is None:
            return None
        try:
            return signatures.from_function(self.find(text), text)
        except Exception as error:
            self.problems.add(node.mark, f"pattern {text!r} not found: {described(error)}")
            return None

    def _dispatched(self, node: Node | None, op: kernels.Op) -> list[KernelEntry | None]:
        """The kernels of an ExecuTorch entry that names them by dispatch key."""
        found = []
        for key, mark, item in self.reader.pairs(node, "dispatch", "a mapping from dispatch keys to kernels"):
            if key not in DISPATCH:
                near = did_you_mean(key, DISPATCH) or f"; known: {', '.join(map(repr, DISPATCH))}"
                self.problems.add(mark, f"unknown dispatch key {key!r}{near}")
                continue
            entry = kernels.read_kernel(self.reader, MappingNode(mark, (("kernel_name", mark, item),)), len(found), op)
            device = Device(DISPATCH[key]) if DISPATCH[key] else None
            found.append(None if entry is None else dataclasses.replace(entry, device=device))
        return found

    def _kernels(
        self,
        fields: Fields,
        kind: str,
        name: str | None,
        signature: Signature | None,
        aliases: Aliases,
        executorch: bool,
    ) -> tuple[KernelEntry, ...]:
        op = kernels.Op(
            name=name or fields.where,
            kind=kind,
            signature=signature,
            aliases=aliases,
            library=self.library.name,
            priority=self.library.priority,
            executorch=executorch,
            has_reference=fields.get("reference") is not None,
        )
        node = fields.get("kernels")
        if node is None and not executorch and not fields.get("replace"):
            self.problems.add(fields.mark, f"{fields.where} has no 'kernels'")
        items = self.reader.items(node, "kernels", "a list of entries with a kernel_name")
        found = [kernels.read_kernel(self.reader, item, index, op) for index, item in enumerate(items)]
        if node is None:
            found += self._dispatched(fields.get("dispatch"), op)
        entries = tuple(entry for entry in found if entry is not None)
        if executorch and self.compiled:
            written = signature.name if signature is not None else name or ""
            entries = tuple(_bound(entry, self.library.name, written) for entry in entries)
        if self.find is not None and signature is not None:
            for entry in entries:
                for text in kernel_problems(entry, signature, self.find):
                    self.problems.add(entry.mark, text)
        return entries


def _has(node: Node, key: str) -> bool:
    return isinstance(node, MappingNode) and any(name == key for name, _, _ in node.items)


def _of_functional(entry: KernelEntry, outs: list[str]) -> KernelEntry:
    """A kernel of an out-variant as one of the operator that returns what it writes."""
    returns = {i: entry.dtypes[name] for i, name in enumerate(outs) if name in entry.dtypes}
    dtypes = {name: alias for name, alias in entry.dtypes.items() if name not in outs}
    return dataclasses.replace(entry, op_kind="op", dtypes=dtypes, returns={**returns, **entry.returns})


def _named_apart(ops: tuple[OpEntry, ...]) -> tuple[OpEntry, ...]:
    """ExecuTorch's kernels have no names but their functions': of one operator, the second is called `f#2`."""
    counts: dict[tuple[str, str], int] = {}

    def named(entry: KernelEntry) -> KernelEntry:
        count = counts[entry.op, entry.name] = counts.get((entry.op, entry.name), 0) + 1
        return entry if count == 1 else dataclasses.replace(entry, name=f"{entry.name}#{count}")

    return tuple(dataclasses.replace(op, kernels=tuple(map(named, op.kernels))) for op in ops)


def bound_namespace(library: str) -> str:
    """The namespace of the operators that are generated for a library's C++ kernels."""
    return f"forge_executorch_{re.sub(r'[^A-Za-z0-9_]', '_', library)}"


def is_bound(entry: KernelEntry, library: str) -> bool:
    """Whether a kernel is called through the generated binding."""
    return (entry.kernel_name or "").startswith(f"{bound_namespace(library)}::")


def _bound(entry: KernelEntry, library: str, written: str) -> KernelEntry:
    """A C++ kernel, called through the operator that the generated binding has for it. written: the operator of its
    entry, which is the same in a process that does not have what it computes."""
    if entry.kernel_name is None or entry.kernel_name.startswith(("python:", "hub:")):
        return entry
    operator = re.sub(r"\W+", "_", f"{entry.kernel_name}__{written}")
    device = entry.device or Device(("cpu",))
    return dataclasses.replace(entry, kernel_name=f"{bound_namespace(library)}::{operator}", device=device)


def kernel_problems(entry: KernelEntry, signature: Signature, find: Find) -> list[str]:
    """Why a kernel, its forward or its backward cannot be called: it is not found, or its signature does not accept
    what it would be given."""
    grad = entry.grad
    own = called_with(entry, signature)
    saving = (own[0], [*own[1], *(grad.saves if entry.out else ())])
    functions = (
        (entry.kernel_name, entry.fn, own if grad.forward else saving),
        (grad.forward, grad.forward_fn, saving),
        (grad.kernel_name, grad.fn, _backward_called_with(entry, signature)),
    )
    problems = []
    for name, given, called in functions:
        if name is not None or given is not None:
            problems += _function_problems(f"kernel {(name or entry.name)!r}", name, given, called, find)
    return problems


def _function_problems(
    label: str, name: str | None, given: Any, called: tuple[list[str], list[str]], find: Find
) -> list[str]:
    try:
        function = given if given is not None else find(name)
    except Exception as error:
        return [f"{label} not found: {described(error)}"]
    return [f"{label}: {text}" for text in signatures.call_problems(function, *called)]


def called_with(entry: KernelEntry, signature: Signature) -> tuple[list[str], list[str]]:
    """What a kernel gets by position (by what it is), and the parameters that it gets by name."""
    if entry.args is None:
        positional, named = _own_arguments(signature)
    else:
        positional, named = _mapped(entry.args)
    return _with_outs(positional, named, entry.out)


def _backward_called_with(entry: KernelEntry, signature: Signature) -> tuple[list[str], list[str]]:
    """As called_with, for its gradient kernel."""
    if entry.grad.args is not None:
        positional, named = _mapped(entry.grad.args)
    else:
        positional, named = _own_arguments(signature) if entry.args is None else _mapped(entry.args)
        positional = ["grad_output"] * (signature.returns or 1) + positional
        named = [*named, *entry.grad.saves]
    return _with_outs(positional, named, entry.grad.out)


def _own_arguments(signature: Signature) -> tuple[list[str], list[str]]:
    ours = [parameter for parameter in signature.parameters if not parameter.out]
    return [p.name for p in ours if not p.keyword_only], [p.name for p in ours if p.keyword_only]


def _mapped(args: tuple[Given, ...]) -> tuple[list[str], list[str]]:
    positional = [_what(given.value) for given in args if given.parameter is None]
    return positional, [given.parameter for given in args if given.parameter is not None]


def _with_outs(positional: list[str], named: list[str], outs: tuple[str | int, ...]) -> tuple[list[str], list[str]]:
    for out in outs:
        if isinstance(out, int):
            positional.insert(out, f"out {out}")
        else:
            named.append(out)
    return positional, named


def _what(value: Any) -> str:
    return value.name if isinstance(value, Argument) else repr(value.value)


def described(error: Exception) -> str:
    """An exception as one line: what a repository is refused for as a whole, of others what their first line says."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if isinstance(error, HubError) and len(lines) > 1:
        return f"{lines[0]} {'; '.join(lines[1:])}"
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _files_beside(folder: Path, text: str) -> list[str]:
    place = (folder / text).parent
    try:
        return [str(PurePosixPath(text).parent / name) for name in os.listdir(place)]
    except OSError:
        return []
