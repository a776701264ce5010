"""The validation of a parsed document to a Manifest: every problem is reported before anything is used."""

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.hub.manifest import signatures
from forge.hub.manifest.aliases import Aliases
from forge.hub.manifest.calls import describe_error, function_problems, kernel_problems, own_arguments
from forge.hub.manifest.errors import InvalidText, Mark, Problems, did_you_mean
from forge.hub.manifest.kernels import KernelReader, function_name, read_kernel
from forge.hub.manifest.model import (
    NO_LIBRARY,
    Build,
    Device,
    KernelEntry,
    Library,
    Manifest,
    OpEntry,
    Requires,
    Resolver,
    Signature,
)
from forge.hub.manifest.ordering import duplicates
from forge.hub.manifest.parse import Document, Node, parse, parsed, read_document
from forge.hub.manifest.schema import (
    BOTH,
    EXECUTORCH,
    Reader,
    WrongKind,
    any_node,
    boolean,
    file_path,
    key,
    pairs,
    section,
    text,
)

VERSION = 1
# the dispatch keys under which an entry may name its kernel, and their devices
DISPATCH = {
    "CPU": ("cpu",),
    "CUDA": ("cuda",),
    "CPU, CUDA": ("cpu", "cuda"),
    "CompositeExplicitAutograd": (),
    "CompositeImplicitAutograd": (),
}
# keys that torch's native_functions.yaml adds to an entry, and a functions.yaml may carry along
NATIVE_FUNCTION_KEYS = frozenset(
    "variants tags namespace structured structured_delegate structured_inherits precomputed ufunc_inner_loop "
    "device_check device_guard cpp_no_default_args python_module category_override manual_cpp_binding "
    "manual_kernel_registration use_const_ref_for_mutable_tensors autogen".split()
)
NO_META = "has neither 'fake' nor 'reference', so that its results are not known before it runs; give it one"
_PATTERN = re.compile(r"[A-Za-z_]\w*|python:\.*[\w.]*:[A-Za-z_][\w.]*")
Find = Callable[[str], Any]


# The operators that a manifest may name: this package does not import them, hubex registers them.
_makers: list[Callable[[], Resolver]] = []


def register_resolver(make: Callable[[], Resolver]) -> None:
    """Register `make`, which returns the resolver for checking manifests."""
    _makers.append(make)


def registered_resolver() -> Resolver:
    """Return a resolver of the operators that loading knows."""
    return _makers[-1]()


def read_manifest(
    path: Path | str,
    resolver: Resolver,
    *,
    find: Find | None = None,
    with_sources: bool = True,
    content: bytes | None = None,
) -> Manifest:
    """Return the manifest in a file. Raises ManifestError with every problem; see validate.

    content: the file's content, if already read.
    with_sources: whether the sources of `build` lie beside it; beside a prebuilt variant they do not.
    """
    path = Path(path)
    document = read_document(path) if content is None else parsed(content, str(path))
    return validate(document, resolver, find=find, folder=path.parent if with_sources else None)


def parse_manifest(
    text: str | bytes, resolver: Resolver, *, file: str = "manifest", find: Find | None = None
) -> Manifest:
    """Return the manifest in a text. Raises ManifestError with every problem; see validate."""
    return validate(parse(text, file), resolver, find=find)


def validate(
    document: Document, resolver: Resolver, *, find: Find | None = None, folder: Path | None = None
) -> Manifest:
    """Return the manifest that a document holds: forge's dialect, or ExecuTorch's functions.yaml (a list).

    resolver: knows the operators. find: returns the function with a kernel's or pattern's name, or raises; without it
    nothing is imported, kernels are not looked up, and a pattern's arguments are not checked. folder: the folder that
    must hold the sources of `build`. Raises ManifestError with every problem.
    """
    problems = Problems()
    problems.entries.extend(document.problems)
    reader = _ManifestReader(problems, folder=folder, resolver=resolver, find=find)
    manifest = None
    if document.root is not None:
        manifest = reader.read(_manifest, document.root, "the manifest")
    elif not document.problems:
        problems.add(Mark(document.file, 1, 1), "the manifest is empty; it begins with forge_kernels: 1")
    problems.raise_any()
    assert manifest is not None, "a manifest without problems was read"
    return manifest


@dataclass(frozen=True, kw_only=True)
class _ManifestReader(Reader):
    """A reader of a document.

    functions: the operators declared so far. compiled: its kernels are C++. selects: an ExecuTorch entry without
    kernels only selects an operator; operators that this torch does not have are skipped.
    """

    resolver: Resolver
    find: Find | None = None
    library: Library = NO_LIBRARY
    functions: dict[str, Signature] = field(default_factory=dict)
    compiled: bool = False
    selects: bool = False

    def resolve(self, name: str) -> Signature | None:
        return self.functions.get(name) or self.resolver.resolve(name)


# the head


def _version(reader: Reader, node: Node, what: str) -> int:
    if type(node.value) is not int or node.value != VERSION:
        raise WrongKind(f"{VERSION}, the version of manifests that this forge reads")
    return VERSION


@dataclass(frozen=True)
class ManifestKeys:
    """The keys of forge's dialect."""

    forge_kernels: int = key(_version, required=True)
    library: Library = key(section(Library, "library "), default=NO_LIBRARY, required=True)
    requires: Requires = key(section(Requires, "requires "), default=Requires())
    build: Build = key(section(Build, "build "), default=Build())
    executorch: Node | None = key(any_node)
    ops: Node | None = key(any_node, required=True)


def _manifest(reader: _ManifestReader, node: Node, what: str) -> Manifest:
    file = node.mark.file
    if node.is_list:
        library = Library(Path(file).stem)
        reader = dataclasses.replace(reader, library=library, dialect=EXECUTORCH)
        manifest = Manifest(file, EXECUTORCH, library, _named_apart(_ops(reader, node)))
    else:
        with_files = node.is_mapping and "executorch" in node.value
        keys = reader.section(ManifestKeys, node, what, optional=("ops",) if with_files else ())
        reader = dataclasses.replace(reader, library=keys.library, compiled=bool(keys.build.cpp))
        ops = reader.read(_list_of_ops, keys.ops, "ops") or ()
        files = (reader.each(_functions, keys.executorch, "executorch")) if keys.executorch is not None else ()
        files = _named_apart(op for each in files for op in each)
        manifest = Manifest(file, reader.dialect, keys.library, ops + files, keys.requires, keys.build)
    by_op: dict[str, list[KernelEntry]] = {}
    for kernel in manifest.kernels:
        by_op.setdefault(kernel.op, []).append(kernel)
    for entries in by_op.values():
        reader.problems.entries.extend(duplicates(entries))
    return manifest


# ExecuTorch's files


def _functions(reader: _ManifestReader, node: Node, what: str) -> tuple[OpEntry, ...]:
    """Return the entries of the functions.yaml that the manifest names."""
    if reader.folder is None:
        raise InvalidText(f"{what}: its files lie beside sources, in a manifest that is built")
    document = read_document(reader.folder / file_path(reader, node, what))
    reader.problems.entries.extend(document.problems)
    if document.root is not None and document.root.is_list:
        return _ops(dataclasses.replace(reader, dialect=EXECUTORCH), document.root)
    if not document.problems:
        problem = "is no functions.yaml, which is a list of entries that begin with '- op: …'"
        reader.problems.add(Mark(document.file, 1, 1), problem)
    return ()


def _functional(reader: _ManifestReader, signature: Signature) -> Signature | None:
    """Return the operator that an out-variant computes, if one with the same arguments exists."""
    names = [p.name for p in signature.parameters if not p.out]
    if len(names) == len(signature.parameters):
        return None
    base, _, overload = signature.name.partition(".")
    stem = overload.removesuffix("out").rstrip("_")
    candidates = map(reader.resolve, (f"{base}.{stem}" if stem else base, base))
    return next((each for each in candidates if each and [p.name for p in each.parameters] == names), None)


def _of_functional(entry: KernelEntry, outs: tuple[str, ...]) -> KernelEntry:
    """Convert a kernel of an out-variant to one of the operator that returns the outputs."""
    returns = {i: entry.dtypes[name] for i, name in enumerate(outs) if name in entry.dtypes}
    dtypes = {name: alias for name, alias in entry.dtypes.items() if name not in outs}
    return dataclasses.replace(entry, op_kind="op", dtypes=dtypes, returns={**returns, **entry.returns})


def _named_apart(ops: Iterable[OpEntry]) -> tuple[OpEntry, ...]:
    """Call the second kernel of one operator `f#2`: ExecuTorch's kernels are named by their functions only."""
    counts: dict[tuple[str, str], int] = {}

    def with_own_name(entry: KernelEntry) -> KernelEntry:
        count = counts[entry.op, entry.name] = counts.get((entry.op, entry.name), 0) + 1
        return entry if count == 1 else dataclasses.replace(entry, name=f"{entry.name}#{count}")

    return tuple(dataclasses.replace(op, kernels=tuple(map(with_own_name, op.kernels))) for op in ops)


def bound_namespace(library: str) -> str:
    """Return the namespace of the operators that are generated for a library's C++ kernels."""
    return f"forge_executorch_{re.sub(r'[^A-Za-z0-9_]', '_', library)}"


def is_bound(entry: KernelEntry, library: str) -> bool:
    """Return whether a kernel is called through the generated binding."""
    return (entry.kernel_name or "").startswith(f"{bound_namespace(library)}::")


def _with_binding(entry: KernelEntry, library: str, operator_name: str) -> KernelEntry:
    """Return a C++ kernel, called through the operator that the generated binding has for it.

    operator_name: the operator of its entry; it is the same in a process that does not have the functional operator.
    """
    if entry.kernel_name is None or entry.kernel_name.startswith(("python:", "hub:")):
        return entry
    operator = re.sub(r"\W+", "_", f"{entry.kernel_name}__{operator_name}")
    device = entry.device or Device(("cpu",))
    return dataclasses.replace(entry, kernel_name=f"{bound_namespace(library)}::{operator}", device=device)


# operators


def _read_operator(reader: _ManifestReader, node: Node, what: str) -> Signature | None:
    spelling = text(reader, node, what).strip()
    name = f"aten::{spelling}" if reader.dialect == EXECUTORCH and "::" not in spelling else spelling
    signature = reader.resolve(name)
    if signature is None and not reader.selects:
        near = did_you_mean(name, (*reader.resolver.names(), *reader.functions))
        if not near and "::" not in spelling and reader.resolver.resolve(f"aten::{spelling}"):
            near = f"; did you mean 'aten::{spelling}'?"
        raise InvalidText(f"unknown operator {name!r}{near}")
    return signature


def _new_operator(reader: _ManifestReader, node: Node, what: str) -> Signature:
    namespace = "aten" if reader.dialect == EXECUTORCH else None
    signature = signatures.parse_schema(text(reader, node, what).strip(), namespace=namespace)
    if signature.name in reader.functions:
        raise InvalidText(f"func {signature.name!r} is declared twice")
    reader.functions[signature.name] = signature
    return signature


def _pattern(reader: _ManifestReader, node: Node, what: str) -> Signature | None:
    name = text(reader, node, what).strip()
    if not _PATTERN.fullmatch(name):
        raise WrongKind("the name of a pattern, or 'python:module:function'")
    if not name.startswith("python:"):
        signature = reader.resolver.resolve(f"pattern:{name}")
        if signature is None:
            names = reader.resolver.names()
            choices = [each.removeprefix("pattern:") for each in names if each.startswith("pattern:")]
            near = did_you_mean(name, choices) or f"; known: {', '.join(choices) or 'none'}, or python:module:function"
            raise InvalidText(f"unknown pattern {name!r}{near}")
        return signature
    try:
        return None if reader.find is None else signatures.from_function(reader.find(name), name)
    except Exception as error:
        raise InvalidText(f"pattern {name!r} not found: {describe_error(error)}") from None


@dataclass(frozen=True)
class OpKeys:
    """The keys of an operator's entry."""

    op: Signature | None = key(_read_operator, dialects=BOTH)
    func: Signature | None = key(_new_operator, dialects=BOTH)
    pattern: Signature | None = key(_pattern)
    kernels: Node | None = key(any_node, dialects=BOTH)
    type_alias: Node | None = key(any_node, dialects=BOTH)
    dim_order_alias: Node | None = key(any_node, dialects=BOTH)
    fake: str | None = key(function_name)
    reference: str | None = key(function_name)
    replace: bool = key(boolean, default=False)
    dispatch: Node | None = key(any_node, dialects=(EXECUTORCH,))


def _list_of_ops(reader: _ManifestReader, node: Node, what: str) -> tuple[OpEntry, ...]:
    if not node.is_list:
        raise WrongKind("a list of entries that begin with '- op: …'")
    return _ops(reader, node)


def _ops(reader: _ManifestReader, node: Node) -> tuple[OpEntry, ...]:
    entries = [reader.read(_op, item, f"ops[{index}]") for index, item in enumerate(node.value)]
    return tuple(entry for entry in entries if entry is not None)


def _op(reader: _ManifestReader, node: Node, what: str) -> OpEntry | None:
    executorch = reader.dialect == EXECUTORCH
    selects = executorch and not any(map(node.get, ("func", "kernels", "dispatch")))
    reader = dataclasses.replace(reader, selects=selects)
    keys = reader.section(OpKeys, node, what, ignored=NATIVE_FUNCTION_KEYS if executorch else ())
    kind = _kind(reader, node)
    signature, declaration = getattr(keys, kind), node.get(kind)
    name = (
        signature.name if signature else str(declaration.plain()).strip() if declaration and kind == "pattern" else ""
    )
    if selects:
        return OpEntry("op", name, signature, (), mark=node.mark) if signature else None
    schema = declaration.plain() if declaration and kind == "func" else None
    if not executorch:
        _check_meta(reader, node, kind, signature)
    functional = _functional(reader, signature) if executorch and kind == "func" and signature else None
    target = functional.name if functional else name
    of_op = KernelReader(
        reader.problems,
        reader.dialect,
        aliases=Aliases().with_own(reader, node),
        op=target or what,
        kind=kind,
        signature=signature,
        library=reader.library,
        has_reference=node.get("reference") is not None,
    )
    kernels = _kernels(reader, node, what, of_op)
    if functional is not None:  # its kernels write to memory that is passed to them
        kernels = [_of_functional(each, of_op.outs) for each in kernels]
        kind, signature = "op", functional
    entries = tuple(dataclasses.replace(each, replaces=keys.replace) for each in kernels)
    return OpEntry(kind, target, signature, entries, schema, keys.fake, keys.reference, keys.replace, node.mark)


def _kind(reader: _ManifestReader, node: Node) -> str:
    kinds = [kind for kind in ("op", "func", "pattern") if node.get(kind) is not None]
    if len(kinds) == 1:
        return kinds[0]
    hint = f"; given: {', '.join(kinds)}" if kinds else ""
    reader.problems.add(node.mark, f"exactly one of 'op', 'func' and 'pattern' is required{hint}")
    return "op"


def _check_meta(reader: _ManifestReader, node: Node, kind: str, signature: Signature | None) -> None:
    """Check that a new operator, and no other, has functions that compute its results' metadata without running it."""
    functions = {name: item for name in ("fake", "reference") if (item := node.get(name)) is not None}
    if kind != "func":
        for name in functions if node.get(kind) is not None and node.get("func") is None else ():
            reader.problems.add(node.place(name), f"{name!r} belongs to a 'func': an {kind} has it already")
    elif signature is not None and reader.find is not None:
        if not functions and reader.resolver.resolve(signature.name) is None:
            reader.problems.add(node.place("func"), f"func {signature.name} {NO_META}")
        arguments = own_arguments(signature)
        for name, item in functions.items():
            if isinstance(item.value, str):
                for problem in function_problems(f"{name} {item.value!r}", item.value, None, arguments, reader.find):
                    reader.problems.add(item.mark, problem)


def _kernels(reader: _ManifestReader, node: Node, what: str, of_op: KernelReader) -> list[KernelEntry]:
    kernels, dispatch = node.get("kernels"), node.get("dispatch")
    executorch = reader.dialect == EXECUTORCH
    if kernels is None and not executorch and not node.get("replace"):
        reader.problems.add(node.mark, f"{what} has no 'kernels'")
    if kernels is not None or not executorch:
        entries = of_op.read(_kernel_list, kernels, "kernels") or []
    else:
        entries = of_op.read(_dispatch_kernels, dispatch, "dispatch") or []
    entries = [entry for entry in entries if entry is not None]
    signature = of_op.signature
    if reader.compiled and executorch:
        entries = [_with_binding(entry, reader.library.name, signature.name if signature else "") for entry in entries]
    if reader.find is not None and signature is not None:
        for entry in entries:
            for problem in kernel_problems(entry, signature, reader.find):
                reader.problems.add(entry.mark, problem)
    return entries


def _kernel_list(reader: KernelReader, node: Node, what: str) -> list[KernelEntry | None]:
    if not node.is_list:
        raise WrongKind("a list of entries with a kernel_name")
    return [read_kernel(reader, item, index) for index, item in enumerate(node.value)]


def _dispatch_kernels(reader: KernelReader, node: Node, what: str) -> list[KernelEntry | None]:
    """Return the kernels of an ExecuTorch entry that names them by dispatch key."""
    kernels: list[KernelEntry | None] = []
    for name, mark, item in pairs(node, "a mapping from dispatch keys to kernels"):
        if name not in DISPATCH:
            near = did_you_mean(name, DISPATCH) or f"; known: {', '.join(map(repr, DISPATCH))}"
            reader.problems.add(mark, f"unknown dispatch key {name!r}{near}")
            continue
        entry = read_kernel(reader, Node(mark, {"kernel_name": item}, {"kernel_name": mark}), len(kernels))
        device = Device(DISPATCH[name]) if DISPATCH[name] else None
        kernels.append(entry and dataclasses.replace(entry, device=device))
    return kernels
