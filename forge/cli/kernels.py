"""forge kernels list, check, verify, bench, lock, new and build, as they are declared: what they do is in
forge/cli/actions/kernels.py."""

from pathlib import Path
from typing import Annotated

import typer

from forge.cli.app import command
from forge.cli.names import LOCK_FILE, Kind
from forge.cli.policy import PolicyOptions

_USE, _MAKE = "Use", "Make"  # headings of the group's help


Sources = Annotated[
    list[str],
    typer.Argument(metavar="SOURCE...", help="org/name@v1, org/name@REVISION, a folder or a manifest's YAML."),
]


@command(
    "kernels list",
    "forge kernels list                          # what the cache holds",
    "forge kernels list ./my-norms --op pattern:rms_norm",
    "forge kernels list --lock forge-kernels.lock",
    panel=_USE,
)
def list_kernels(
    policy: PolicyOptions,
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SOURCE...]", help="Show the kernels and layers of these, instead of the cache."),
    ] = None,
    lock: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Show what this lock file holds, instead of the cache.")
    ] = None,
    op: Annotated[
        str | None,
        typer.Option(metavar="OP", help="Of SOURCE, one operator's kernels: torch.add, pattern:swiglu."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Of SOURCE, print a JSON list, not a table.")] = False,
) -> None:
    """Show what the cache, a lock file or repositories hold."""


@command(
    "kernels check",
    "forge kernels check ./my-norms              # a folder",
    "forge kernels check acme/my-norms@v1 --fetch   # a repository, all variants",
    "forge kernels check --lock forge-kernels.lock",
    panel=_MAKE,
)
def check(
    policy: PolicyOptions,
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SOURCE...]", help="A folder, org/name@v1 or org/name@REVISION."),
    ] = None,
    lock: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Verify every file of the kernels in this lock file.")
    ] = None,
    fetch: Annotated[bool, typer.Option("--fetch", help="Fetch what is not in the cache; check all variants.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Hold repositories against the Hub's requirements, and files against a lock.

    Nothing of a kernel is executed. The exit status is 1 where something is wrong.
    """


@command(
    "kernels verify",
    "forge kernels verify ./my-norms",
    "forge kernels verify acme/my-norms@v1 --allow acme --seconds 10",
    panel=_USE,
)
def verify(
    policy: PolicyOptions,
    sources: Sources,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a kernel may take for one sample.")
    ] = 60.0,
) -> None:
    """Compare kernels with torch on samples, gradients included.

    The exit status is 1 where one is wrong.
    """


@command(
    "kernels bench",
    "forge kernels bench ./my-norms",
    "forge kernels bench ./my-norms --op rms_norm --dtype float32 --shapes 2x64,64",
    "forge kernels bench ./my-norms --backward --json -",
    panel=_USE,
)
def bench(  # noqa: PLR0913  the command's options
    policy: PolicyOptions,
    sources: Sources,
    op: Annotated[
        str | None, typer.Option(metavar="OP", help="Kernels of this operation alone, as verify prints it.")
    ] = None,
    shapes: Annotated[
        list[str] | None, typer.Option(metavar="2x512,512", help="The shape of each tensor; may be repeated.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="This one alone, such as bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(metavar="DEVICE", help="This one alone, such as cuda:1.")] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Time forward and backward together.")] = False,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Time kernels without asking whether they are right.")
    ] = False,
    json_to: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write JSON to a file; - for stdout, in the table's place."),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE.png", help="Draw time against size (needs matplotlib).")
    ] = None,
) -> None:
    """Time kernels against eager, their references and the fuser.

    The exit status is 1 where one of them was not timed.
    """


@command(
    "kernels lock",
    "forge kernels lock ./my-norms",
    "forge kernels lock acme/my-norms@v1 --all-variants",
    "forge kernels lock                # all that the lock file holds, again",
    panel=_USE,
)
def lock(
    policy: PolicyOptions,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCE...]",
            help="A folder, org/name@v1 or org/name@REVISION; without any, all that the lock file holds, again.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The lock file.")] = Path(LOCK_FILE),
    variant: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Lock this one instead of this system's; may be repeated.")
    ] = None,
    all_variants: Annotated[bool, typer.Option("--all-variants", help="Lock all, for other systems too.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Lock what check finds something wrong with, too.")] = False,
) -> None:
    """Write the commit and the sha256 of every file to a lock file."""


@command(
    "kernels new",
    "forge kernels new my-gate                   # in C++, for CPUs",
    "forge kernels new my-norms --kind triton --folder kernels/my-norms",
    panel=_MAKE,
)
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Lower-case words between dashes, such as fast-gelu.")],
    kind: Annotated[Kind, typer.Option(metavar="KIND", help="cpp: C++ for CPUs, or triton.")] = "cpp",
    folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where it goes, instead of NAME below this folder.")
    ] = None,
) -> None:
    """Write a source tree of a kernel, to be filled in.

    It builds, conforms and verifies as it stands.
    """


@command(
    "kernels build",
    "forge kernels build ./my-gate",
    "forge kernels build ./my-gate --output dist --force",
    panel=_MAKE,
)
def build(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE...", help="A folder with build.toml, or one whose manifest has build:."),
    ],
    force: Annotated[bool, typer.Option("--force", help="Rebuild what is there.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FOLDER", help="Where the variants of a build.toml go, instead of build/."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", metavar="N", help="Compilers at once; one a core by default.")
    ] = None,
) -> None:
    """Compile the sources of kernels, unless that is done.

    Prints where each library or variant is.
    """
