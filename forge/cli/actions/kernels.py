"""Actions of forge kernels list, check, verify, bench, lock, new and build; forge/cli/kernels.py declares them."""

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from forge import hub
from forge.benchmark import kernel_bench
from forge.cli.policy import PolicyOptions
from forge.executors import hubex
from forge.executors.hubex.gather import local_manifest, variants_beside
from forge.executors.hubex.registry import of_operation
from forge.executors.hubex.verification.verification_cache import OK
from forge.hub import builder, cache, lockfile, variants
from forge.hub.conformance.repository import escape
from forge.hub.manifest import read_manifest
from forge.ir.printing import quantity, table


def list_kernels(
    policy: PolicyOptions, sources: list[str] | None, lock: Path | None, op: str | None, as_json: bool
) -> int:
    if sources:
        _print_listed(sources, policy, op, as_json)
        return 0
    if lock is not None:
        for kernel in hub.read_lock(lock).kernels:
            version = f"v{kernel.version}" if kernel.version is not None else kernel.revision or ""
            print(f"{kernel.source}  {version}  {(kernel.commit or 'folder')[:12]}  {', '.join(kernel.variants)}")
        return 0
    repositories = cache.cached_repositories()
    if not repositories:
        text = "the cache holds no kernels of the Hub; forge kernels list SOURCE shows those of SOURCE"
        print(f"forge: {text}", file=sys.stderr)
    for repository in repositories:
        entry = cache.repository_cache(repository)
        refs = {commit: name for name, commit in entry.refs().items()}
        for commit in entry.commits():
            print(f"{repository}  {refs.get(commit, '-')}  {commit[:12]}  {', '.join(entry.variants(commit)) or '-'}")
    return 0


def _print_listed(sources: list[str], policy: PolicyOptions, op: str | None, as_json: bool) -> None:
    """Print the kernels of sources, and the layers, which have no operator."""
    kernels: list[hubex.Kernel] = []
    layers: list[hubex.LayerRow] = []
    for source in sources:
        source_layers = (
            [] if op is not None else hubex.layers_in(source, policy=_policy(policy), backend=policy.backend)
        )
        try:
            kernels += hubex.gather([source], policy=_policy(policy), backend=policy.backend)
        except hub.NoManifestError:
            if not source_layers:
                raise
        layers += source_layers
    if op is not None:
        _, kernels = of_operation(op, kernels, "--op")
    kernel_table = hubex.table_of(kernels, hubex.verifier)
    if as_json:
        print(json.dumps([asdict(row) for row in (*kernel_table, *layers)], indent=2))
    else:
        tables = [str(kernel_table)] if kernel_table or not layers else []
        print("\n\n".join([*tables, *([hubex.layer_table(layers)] if layers else [])]))


def check(policy: PolicyOptions, sources: list[str] | None, lock: Path | None, fetch: bool, as_json: bool) -> int:
    path = lock
    if not sources and path is None:
        path = Path(lockfile.DEFAULT_NAME)
        if not path.exists():
            print(
                "forge: nothing to check: give a folder or org/name@v1, or a lock file with --lock "
                f"(there is no {path} here)",
                file=sys.stderr,
            )
            return 2
        print(f"forge: checks the files of {path}, as nothing else was given", file=sys.stderr)
    checked = [_attempt(source, functools.partial(_check_source, source, policy, fetch)) for source in sources or ()]
    if path is not None:
        lock_file = hub.read_lock(path)
        for kernel in lock_file.kernels:
            checked.append(_attempt(kernel.source, functools.partial(_check_locked, kernel, lock_file, policy)))
    if not checked:
        print(f"forge: nothing to check: {path} holds no kernels", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps({"sources": [each.as_json() for each in checked]}, indent=2))
    else:
        for each in checked:
            each.print()
    return 1 if any(each.has_failed for each in checked) else 0


@dataclass
class SourceCheck:
    """The result of checking one source: lines, and findings. error: why the check failed, or how the source differs
    from its lock."""

    source: str
    lines: list[str] = field(default_factory=list)
    findings: list[hub.Finding] = field(default_factory=list)
    error: str | None = None

    @property
    def has_failed(self) -> bool:
        return self.error is not None or any(not each.advice for each in self.findings)

    def as_json(self) -> dict[str, Any]:
        findings = [each.as_json() for each in self.findings]
        return {"source": self.source, "ok": not self.has_failed, "error": self.error, "findings": findings}

    def print(self) -> None:
        if self.error is not None:
            _print_escaped(f"failed  {self.error}")
        for line in self.lines:
            _print_escaped(line)
        for finding in self.findings:
            _print_finding(finding)


def _print_escaped(lines: str) -> None:
    """Print lines with control characters escaped: a folder's name may hold some."""
    print("\n".join(map(escape, lines.split("\n"))))


def _print_finding(finding: hub.Finding) -> None:
    if not sys.stdout.isatty():
        print(finding)
        return
    where, _, rest = str(finding).partition(f": {finding.requirement}: ")
    line = Text.assemble(
        (where, "bold"), ": ", (finding.requirement, "yellow" if finding.advice else "red"), ": ", rest
    )
    Console(soft_wrap=True).print(line)


def _attempt(source: str, check: Callable[[], SourceCheck]) -> SourceCheck:
    try:
        return check()
    except (hub.HubError, ValueError, TypeError) as error:
        return SourceCheck(source, error=str(error))


def _check_source(source: str, policy: PolicyOptions, fetch: bool) -> SourceCheck:
    """Return the variant that would be loaded, the reasons against the others, and every finding. Of a repository of
    the Hub only cached variants are checked, unless the rest may be fetched."""
    selection = hub.select(source, policy=_policy(policy), backend=policy.backend)
    if selection.commit is None:
        assert selection.source.path is not None, "a source without a commit is a folder"
        findings = hub.check_repository(selection.source.path, policy=_policy(policy))
    else:
        names = [*selection.choice.accepted, *(name for name, _ in selection.choice.rejected)]
        available = hub.cached_variants(selection, names)
        if fetch:
            for name in (each for each in names if each not in available):
                hub.fetch(selection, name)
            available = names
        if missing := [name for name in names if name not in available]:
            text = f"{source}: not checked, as not in the cache: {', '.join(missing)}; --fetch fetches them"
            print(f"forge: {text}", file=sys.stderr)
        findings = hub.check_selection(selection, available) if available else []
    checked = SourceCheck(source, findings=findings)
    if selection.choice.accepted:
        word = "failed" if checked.has_failed else "ok    "
        checked.lines.append(f"{word}  {selection.place(selection.variant)}")
    elif findings or selection.commit is None:
        word = "failed" if checked.has_failed else "ok    "
        checked.lines.append(f"{word}  {selection.place()}: no variant fits this system (backend {selection.backend})")
    else:
        checked.error = f"{selection.place()}: no variant fits this system (backend {selection.backend})"
    if others := selection.choice.accepted[1:]:
        checked.lines.append(f"  fit as well: {', '.join(others)}")
    if selection.choice.rejected:
        checked.lines.append(variants.describe(selection.choice.rejected).removeprefix("\n"))
    return checked


def _check_locked(kernel: hub.LockedKernel, lock: hub.Lock, policy: PolicyOptions) -> SourceCheck:
    """Return every check before an import; what is not in the cache is fetched."""
    place, count = hub.check_locked(kernel, lock, policy=_policy(policy), backend=policy.backend)
    files = f"{quantity(count, 'file')} {'is' if count == 1 else 'are'} as locked"
    return SourceCheck(kernel.source, [f"ok      {place}: {files}"])


def verify(policy: PolicyOptions, sources: list[str], seconds: float) -> int:
    kernels = hubex.gather(sources, policy=_policy(policy), backend=policy.backend)
    rows = [row for kernel in kernels for row in hubex.verify_all(kernel, hubex.Verifier(seconds))]
    print("\n".join(table([("kernel", "op", "dtype", "device", "samples", "verdict"), *rows])))
    return 0 if all(row[-1].startswith(OK) for row in rows) else 1


def bench(  # noqa: PLR0913  the command's options
    policy: PolicyOptions,
    sources: list[str],
    op: str | None,
    shapes: list[str] | None,
    dtype: str | None,
    device: str | None,
    backward: bool,
    unverified: bool,
    json_to: str | None,
    plot: str | None,
) -> int:
    run = functools.partial(
        kernel_bench.bench,
        op=op,
        shapes=[kernel_bench.parse_shapes(each) for each in shapes or ()],
        dtype=None if dtype is None else kernel_bench.parse_dtype(dtype),
        device=None if device is None else kernel_bench.parse_device(device),
        backward=backward,
        verifier=None if unverified else hubex.verifier,
    )
    for option, path in (("--json", json_to), ("--plot", plot)):
        if path not in (None, "-") and not Path(path).parent.is_dir():
            raise ValueError(f"{option} is {path!r}, but there is no folder {Path(path).parent}")
    draw = None if plot is None else kernel_bench.plotter(Path(plot))
    kernels = hubex.gather(sources, policy=_policy(policy), backend=policy.backend)
    results = list(run(kernels))
    text = json.dumps(kernel_bench.as_json(results), indent=1)
    if json_to not in (None, "-"):
        Path(json_to).write_text(text + "\n")
    if json_to == "-":
        print(text)
    elif sys.stdout.isatty():
        Console().print(kernel_bench.rich_table(results))
    else:
        print(kernel_bench.show(results))
    for line in kernel_bench.slower_kernels(results):
        print(f"forge: {line}", file=sys.stderr)
    if draw is not None:
        draw(results)
    return 1 if any(each.kernel in each.reasons for each in results) else 0


def lock(
    policy: PolicyOptions,
    sources: list[str] | None,
    output: Path,
    variant: list[str] | None,
    all_variants: bool,
    force: bool,
) -> int:
    if not output.name.endswith(lockfile.SUFFIX):
        name = output.with_suffix(lockfile.SUFFIX) if output.name else output / lockfile.DEFAULT_NAME
        raise ValueError(
            f"{output}: a lock file's name must end in {lockfile.SUFFIX}, or it is not read as one: such as {name}"
        )
    if not sources and not (output.exists() and hub.read_lock(output).kernels):
        hint = f"{output} holds none to lock again"
        print(f"forge: nothing to lock: give a folder or org/name@v1 ({hint})", file=sys.stderr)
        return 2
    result = hub.lock_kernels(
        sources or [],
        output,
        variants=variant or [],
        all_variants=all_variants,
        policy=_policy(policy),
        backend=policy.backend,
        accept=None if force else _accept,
    )
    count = sum(len(files) for kernel in result.kernels for files in (*kernel.variants.values(), kernel.files))
    print(f"{output}: {quantity(len(result.kernels), 'kernel')}, {quantity(count, 'file')}")
    return 0


def _accept(selection: hub.Selection, names: Sequence[str]) -> None:
    """Raise MalformedError for what `forge kernels check` does not accept."""
    findings = [each for each in hub.check_selection(selection, names) if not each.advice]
    if findings:
        lines = "".join(f"\n  {each}" for each in findings)
        raise hub.MalformedError(f"{selection.place()}: does not conform (--force locks it all the same):{lines}")


def new(name: str, kind: str, folder: Path | None) -> int:
    where = folder or Path(name)
    for path in builder.write_new(name, where, kind):
        print(path)
    print(f"forge: fill it in, then: forge kernels build {where}", file=sys.stderr)
    return 0


def build(sources: list[str], force: bool, output: Path | None, jobs: int | None) -> int:
    for source in sources:
        if (Path(source) / builder.FILE).exists():
            _build_tree(source, output, jobs, force)
        else:
            _build_manifest(source, force)
    return 0


def _build_tree(source: str, output: Path | None, jobs: int | None, force: bool) -> None:
    tree = builder.build_tree(source, output=output, jobs=jobs, force=force)
    for variant in tree.variants:
        if not variant.fresh:
            print(f"forge: {variant.path.name} is up to date", file=sys.stderr)
        print((output or Path(source, "build")) / variant.path.name)
    for backend, reason in tree.skipped.items():
        print(f"forge: not built for {backend}: {reason}", file=sys.stderr)


def _build_manifest(source: str, force: bool) -> None:
    policy, path = hub.Policy(local=True), local_manifest(source)
    if path is None:
        raise ValueError(f"{source}: only a folder of this machine or a manifest's file has sources")
    manifest = read_manifest(path, hubex.operators())
    if not manifest.build.sources:
        raise ValueError(
            f"{path}: there is nothing to build; build: {{cpp: [...]}} names sources, and so does {builder.FILE}"
        )
    built = hub.build_kernels(manifest, policy=policy, force=force)
    print(built.path.parent)
    if fits := variants_beside(path, policy=policy).choice.accepted:
        print(f"forge: the prebuilt variant {fits[0]} is taken before it", file=sys.stderr)
    if "cuda sources" in built.skipped:
        print(f"forge: the CUDA sources are left out: {built.skipped['cuda sources']}", file=sys.stderr)


def _policy(options: PolicyOptions) -> hub.Policy:
    """Return the Policy of a command line; a folder that stands on it is allowed by standing there."""
    allowed = options.allow or []
    return hub.Policy(
        trust=options.trust,
        repositories=tuple(name for name in allowed if "/" in name),
        publishers=tuple(name for name in allowed if "/" not in name),
        signatures=options.signatures,
        imports=tuple(options.allow_import or ()),
        local=True,
    )
