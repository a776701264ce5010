"""The command `forge`: `forge doctor`, `forge kernels list | lock | check | new | build | bench | verify`."""

import argparse
import functools
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

import forge
from forge import doctor, hub, kernel_bench
from forge.executors import hubex
from forge.executors.hubex.gather import local_manifest, variants_beside
from forge.executors.hubex.registry import of_operation
from forge.executors.hubex.verification.verdicts import OK
from forge.hub import builder, cache, lockfile, variants
from forge.hub.manifest import read_manifest
from forge.ir.printing import counted, table


@dataclass(frozen=True)
class Command:
    """A sub-command: `arguments` adds what it takes to its parser, `run` does it and gives the exit status."""

    name: str
    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Gives 1, with one line on stderr, for a kernel that cannot be used; 2 for a usage error."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except BrokenPipeError:  # who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (hub.HubError, ValueError, TypeError, OSError) as error:  # the last: a path that the system refuses
        print(f"forge: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forge", description="A compiler framework for PyTorch.")
    versions = f"forge {forge.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    parser.add_argument("--version", action="version", version=versions)
    groups = parser.add_subparsers(metavar="COMMAND", required=True)
    kernels = groups.add_parser("kernels", help="kernels of the Hugging Face Kernel Hub")
    commands = kernels.add_subparsers(metavar="COMMAND", required=True)
    for parsers, command in [*((commands, each) for each in KERNEL_COMMANDS), *((groups, each) for each in COMMANDS)]:
        each = parsers.add_parser(command.name, help=command.help, description=command.help)
        command.arguments(each)
        each.set_defaults(run=command.run)
    return parser


def add_policy(parser: argparse.ArgumentParser) -> None:
    """The options that make a Policy and choose a backend."""
    parser.add_argument(
        "--trust", choices=["locked", "publisher", "any"], default="publisher", help="whom to take from"
    )
    parser.add_argument("--allow", action="append", default=[], metavar="ORG[/NAME]", help="trust this one too")
    parser.add_argument(
        "--allow-import", action="append", default=[], metavar="NAME", help="kernels may import this module too"
    )
    parser.add_argument("--signatures", choices=["off", "warn", "enforce"], default="off", help="what a bad one does")
    parser.add_argument("--backend", help="choose variants for this backend, such as cpu")


def policy_of(arguments: argparse.Namespace) -> hub.Policy:
    """The Policy of a command line; a folder that stands on it is allowed by standing there."""
    return hub.Policy(
        trust=arguments.trust,
        repositories=tuple(name for name in arguments.allow if "/" in name),
        publishers=tuple(name for name in arguments.allow if "/" not in name),
        signatures=arguments.signatures,
        imports=tuple(arguments.allow_import),
        local=True,
    )


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="show the kernels of these, instead of the cache")
    parser.add_argument("--lock", type=Path, help="what this lock file holds, instead of what the cache does")
    parser.add_argument("--op", help="of SOURCE, the kernels of one operator only: torch.add, pattern:swiglu")
    parser.add_argument("--json", action="store_true", help="of SOURCE, one JSON list instead of a table")
    add_policy(parser)


def _list(arguments: argparse.Namespace) -> int:
    if arguments.sources:
        kernels = hubex.gather(arguments.sources, policy=policy_of(arguments), backend=arguments.backend)
        if arguments.op is not None:
            _, kernels = of_operation(arguments.op, kernels)
        found = hubex.table_of(kernels, hubex.verifier)
        print(json.dumps([asdict(row) for row in found], indent=2) if arguments.json else found)
        return 0
    if arguments.lock is not None:
        for kernel in hub.read_lock(arguments.lock).kernels:
            wanted = f"v{kernel.version}" if kernel.version is not None else kernel.revision or ""
            print(f"{kernel.source}  {wanted}  {(kernel.commit or 'folder')[:12]}  {', '.join(kernel.variants)}")
        return 0
    repositories = cache.cached_repositories()
    if not repositories:
        text = "the cache holds no kernels of the Hub; forge kernels list SOURCE shows those of SOURCE"
        print(f"forge: {text}", file=sys.stderr)
    for repository in repositories:
        held = cache.repository_cache(repository)
        refs = {commit: name for name, commit in held.refs().items()}
        for commit in held.commits():
            print(f"{repository}  {refs.get(commit, '-')}  {commit[:12]}  {', '.join(held.variants(commit)) or '-'}")
    return 0


def _lock_arguments(parser: argparse.ArgumentParser) -> None:
    wanted = "org/name@v1, org/name@REVISION or a folder; all that the lock file holds, at their newest, without any"
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help=wanted)
    parser.add_argument("--output", "-o", type=Path, default=Path(lockfile.DEFAULT_NAME), help="the lock file")
    parser.add_argument("--variant", action="append", default=[], help="lock this one instead of this system's")
    parser.add_argument("--all-variants", action="store_true", help="lock all, for other systems too")
    parser.add_argument("--force", action="store_true", help="lock what `check` finds something wrong with, too")
    add_policy(parser)


def _lock(arguments: argparse.Namespace) -> int:
    path = arguments.output
    if not arguments.sources and not (path.exists() and hub.read_lock(path).kernels):
        print(f"forge: nothing to lock: give a folder or org/name@v1 ({path} holds none to lock anew)", file=sys.stderr)
        return 2
    lock = hub.lock_kernels(
        arguments.sources,
        arguments.output,
        variants=arguments.variant,
        all_variants=arguments.all_variants,
        policy=policy_of(arguments),
        backend=arguments.backend,
        accept=None if arguments.force else _accept,
    )
    count = sum(len(files) for kernel in lock.kernels for files in (*kernel.variants.values(), kernel.files))
    print(f"{arguments.output}: {counted(len(lock.kernels), 'kernel')}, {counted(count, 'file')}")
    return 0


def _accept(selection: hub.Selection, names: Sequence[str]) -> None:
    """Raises MalformedError for what `forge kernels check` does not accept."""
    found = [each for each in hub.check_selection(selection, names) if not each.advice]
    if found:
        lines = "".join(f"\n  {each}" for each in found)
        raise hub.MalformedError(f"{selection.place()}: does not conform (--force locks it all the same):{lines}")


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="a folder, org/name@v1 or org/name@REVISION")
    parser.add_argument("--lock", type=Path, help="verify every file of the kernels in this lock file")
    parser.add_argument("--fetch", action="store_true", help="fetch what is not in the cache, and check all variants")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    add_policy(parser)


def _check(arguments: argparse.Namespace) -> int:
    """Each source against the Hub's requirements, each kernel of a lock file against the lock; nothing is executed."""
    policy, path = policy_of(arguments), arguments.lock
    if not arguments.sources and path is None:
        path = Path(lockfile.DEFAULT_NAME)
        if not path.exists():
            print(
                "forge: nothing to check: give a folder or org/name@v1, or a lock file with --lock "
                f"(there is no {path} here)",
                file=sys.stderr,
            )
            return 2
        print(f"forge: checks the files of {path}, as nothing else was given", file=sys.stderr)
    checked = [_attempt(source, lambda s=source: _check_source(s, policy, arguments)) for source in arguments.sources]
    lock = hub.read_lock(path) if path is not None else None
    if not checked and not lock.kernels:
        print(f"forge: nothing to check: {path} holds no kernels", file=sys.stderr)
        return 2
    for kernel in lock.kernels if lock is not None else ():
        asked = functools.partial(_check_locked, kernel, lock, policy, arguments.backend)
        checked.append(_attempt(kernel.source, asked))
    if arguments.json:
        print(json.dumps({"sources": [each.as_json() for each in checked]}, indent=2))
    else:
        for each in checked:
            each.print()
    return 1 if any(each.failed for each in checked) else 0


@dataclass
class Checked:
    """What is said of one source: lines, and findings. error: why it could not be checked, or is not as locked."""

    source: str
    lines: list[str] = field(default_factory=list)
    findings: list[hub.Finding] = field(default_factory=list)
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None or any(not each.advice for each in self.findings)

    def as_json(self) -> dict[str, Any]:
        findings = [each.as_json() for each in self.findings]
        return {"source": self.source, "ok": not self.failed, "error": self.error, "findings": findings}

    def print(self) -> None:
        if self.error is not None:
            print(f"failed  {self.error}")
        for line in self.lines:
            print(line)
        for finding in self.findings:
            _print_finding(finding)


def _print_finding(finding: hub.Finding) -> None:
    if not sys.stdout.isatty():
        print(finding)
        return
    where, _, rest = str(finding).partition(f": {finding.requirement}: ")
    line = Text.assemble(
        (where, "bold"), ": ", (finding.requirement, "yellow" if finding.advice else "red"), ": ", rest
    )
    Console(soft_wrap=True).print(line)


def _attempt(source: str, check: Callable[[], Checked]) -> Checked:
    try:
        return check()
    except (hub.HubError, ValueError, TypeError) as error:
        return Checked(source, error=str(error))


def _check_source(source: str, policy: hub.Policy, arguments: argparse.Namespace) -> Checked:
    """Which variant would be loaded, why not each other, and every finding. Of a repository of the Hub those variants
    are checked that the cache holds, unless the rest may be fetched."""
    selection = hub.select(source, policy=policy, backend=arguments.backend)
    if selection.commit is None:
        findings = hub.check_repository(selection.source.path, policy=policy)
    else:
        names = [*selection.choice.accepted, *(name for name, _ in selection.choice.rejected)]
        held = hub.cached(selection, names)
        if arguments.fetch:
            for name in (each for each in names if each not in held):
                hub.fetch(selection, name)
            held = names
        if left := [name for name in names if name not in held]:
            text = f"{source}: not checked, as not in the cache: {', '.join(left)}; --fetch fetches them"
            print(f"forge: {text}", file=sys.stderr)
        findings = hub.check_selection(selection, held) if held else []
    checked = Checked(source, findings=findings)
    if selection.choice.accepted:
        word = "failed" if checked.failed else "ok    "
        checked.lines.append(f"{word}  {selection.place(selection.variant)}")
    elif findings or selection.commit is None:
        word = "failed" if checked.failed else "ok    "
        checked.lines.append(f"{word}  {selection.place()}: no variant fits this system (backend {selection.backend})")
    else:
        checked.error = f"{selection.place()}: no variant fits this system (backend {selection.backend})"
    if others := selection.choice.accepted[1:]:
        checked.lines.append(f"  fit as well: {', '.join(others)}")
    if selection.choice.rejected:
        checked.lines.append(variants.describe(selection.choice.rejected).removeprefix("\n"))
    return checked


def _check_locked(kernel: hub.LockedKernel, lock: hub.Lock, policy: hub.Policy, backend: str | None) -> Checked:
    """Every check before an import; what is not in the cache is fetched."""
    place, count = hub.check_locked(kernel, lock, policy=policy, backend=backend)
    files = f"{counted(count, 'file')} {'is' if count == 1 else 'are'} as locked"
    return Checked(kernel.source, [f"ok      {place}: {files}"])


def _build_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="a folder with build.toml, or one whose manifest has build:"
    )
    parser.add_argument("--force", action="store_true", help="compile anew what is there")
    parser.add_argument("--output", "-o", type=Path, help="where the variants of a build.toml go, instead of build/")
    parser.add_argument("--jobs", "-j", type=int, help="compilers at once; one a core by default")


def _build(arguments: argparse.Namespace) -> int:
    """Prints where each library or variant is; what else there is to say goes to stderr."""
    for source in arguments.sources:
        if (Path(source) / builder.FILE).exists():
            _build_tree(source, arguments)
        else:
            _build_manifest(source, arguments)
    return 0


def _build_tree(source: str, arguments: argparse.Namespace) -> None:
    tree = builder.build_tree(source, output=arguments.output, jobs=arguments.jobs, force=arguments.force)
    for variant in tree.variants:
        if not variant.fresh:
            print(f"forge: {variant.path.name} is up to date", file=sys.stderr)
        print((arguments.output or Path(source, "build")) / variant.path.name)
    for backend, reason in tree.skipped.items():
        print(f"forge: not built for {backend}: {reason}", file=sys.stderr)


def _build_manifest(source: str, arguments: argparse.Namespace) -> None:
    policy, path = hub.Policy(local=True), local_manifest(source)
    if path is None:
        raise ValueError(f"{source}: only a folder of this machine or a manifest's file has sources")
    manifest = read_manifest(path, hubex.operators())
    if not manifest.build.sources:
        raise ValueError(
            f"{path}: there is nothing to build; build: {{cpp: [...]}} names sources, and so does {builder.FILE}"
        )
    built = hub.build_kernels(manifest, policy=policy, force=arguments.force)
    print(built.path.parent)
    if fits := variants_beside(path, policy=policy).choice.accepted:
        print(f"forge: the prebuilt variant {fits[0]} is taken before it", file=sys.stderr)
    if "cuda sources" in built.skipped:
        print(f"forge: the CUDA sources are left out: {built.skipped['cuda sources']}", file=sys.stderr)


def _new_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="lower-case words between dashes, such as fast-gelu")
    parser.add_argument("--kind", choices=builder.KINDS, default="cpp", help="C++ for CPUs, or Triton")
    parser.add_argument("--folder", type=Path, help="where it goes; NAME below this folder by default")


def _new(arguments: argparse.Namespace) -> int:
    folder = arguments.folder or Path(arguments.name)
    for path in builder.write_new(arguments.name, folder, arguments.kind):
        print(path)
    print(f"forge: fill it in, then: forge kernels build {folder}", file=sys.stderr)
    return 0


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="org/name@v1, org/name@REVISION, a folder or YAML")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long a kernel may take for one sample")
    add_policy(parser)


def _verify(arguments: argparse.Namespace) -> int:
    """Runs every kernel on samples of its operation, and compares it with its reference."""
    kernels = hubex.gather(arguments.sources, policy=policy_of(arguments), backend=arguments.backend)
    rows = [row for kernel in kernels for row in hubex.verify_all(kernel, hubex.Verifier(arguments.seconds))]
    print("\n".join(table([("kernel", "op", "dtype", "device", "samples", "verdict"), *rows])))
    return 0 if all(row[-1].startswith(OK) for row in rows) else 1


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="org/name@v1, org/name@REVISION, a folder or YAML")
    parser.add_argument("--op", help="kernels of this operation alone, as verify prints it")
    parser.add_argument(
        "--shapes", action="append", default=[], metavar="2x512,512", help="of each tensor; may be repeated"
    )
    parser.add_argument("--dtype", help="this one alone, such as bfloat16")
    parser.add_argument("--device", help="this one alone, such as cuda:1")
    parser.add_argument("--backward", action="store_true", help="time forward and backward together")
    parser.add_argument("--unverified", action="store_true", help="time kernels without asking whether they are right")
    parser.add_argument("--json", metavar="FILE", help="write JSON to a file; - for stdout, in the place of the table")
    parser.add_argument("--plot", metavar="FILE.png", help="draw time against size (needs matplotlib)")
    add_policy(parser)


def _bench(arguments: argparse.Namespace) -> int:
    """Times kernels; the status is 1 where one of them was not timed."""
    options = {
        "op": arguments.op,
        "shapes": [kernel_bench.parse_shapes(each) for each in arguments.shapes],
        "dtype": None if arguments.dtype is None else kernel_bench.parse_dtype(arguments.dtype),
        "device": None if arguments.device is None else kernel_bench.parse_device(arguments.device),
        "backward": arguments.backward,
        "verifier": None if arguments.unverified else hubex.verifier,
    }
    for option, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path not in (None, "-") and not Path(path).parent.is_dir():
            raise ValueError(f"{option} is {path!r}, but there is no folder {Path(path).parent}")
    draw = None if arguments.plot is None else kernel_bench.plotter(Path(arguments.plot))
    kernels = hubex.gather(arguments.sources, policy=policy_of(arguments), backend=arguments.backend)
    results = list(kernel_bench.bench(kernels, **options))
    text = json.dumps(kernel_bench.as_json(results), indent=1)
    if arguments.json not in (None, "-"):
        Path(arguments.json).write_text(text + "\n")
    if arguments.json == "-":
        print(text)
    elif sys.stdout.isatty():
        Console().print(kernel_bench.rich_table(results))
    else:
        print(kernel_bench.show(results))
    if draw is not None:
        draw(results)
    return 1 if any(each.kernel in each.reasons for each in results) else 0


KERNEL_COMMANDS = (
    Command("list", "what the cache or a lock file holds", _list_arguments, _list),
    Command("lock", "write the commit and the sha256 of every file to a lock file", _lock_arguments, _lock),
    Command(
        "check", "whether repositories meet the Hub's requirements, and files are as locked", _check_arguments, _check
    ),
    Command("new", "write a source tree of a kernel, to be filled in", _new_arguments, _new),
    Command("build", "compile the sources of kernels, unless the cache has them", _build_arguments, _build),
    Command("bench", "time kernels against eager, their references and the fuser", _bench_arguments, _bench),
    Command("verify", "run kernels on samples and compare them with torch", _verify_arguments, _verify),
)


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON, for a bug report")


def _doctor(arguments: argparse.Namespace) -> int:
    """Prints what forge finds here; the status is 1 where something of it costs the user something."""
    findings = doctor.examine()
    print(json.dumps(doctor.as_json(findings), indent=1) if arguments.json else doctor.show(findings))
    return 1 if any(each.state == "problem" for each in findings) else 0


COMMANDS = (Command("doctor", "what forge finds on this machine, and what is wrong", _doctor_arguments, _doctor),)
