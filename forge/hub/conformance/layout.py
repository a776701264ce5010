"""The requirements on folders: build/, the names of variants, recommended variants, `__init__.py`, readable files."""

from collections.abc import Iterator

from forge.hub.conformance.manifests import has_sources
from forge.hub.conformance.repository import Finding, Repository, Variant, variant_problem

# Torch versions and toolkits for which the Hub wants a variant per processor and system: its list of build variants.
TORCHES = ("210", "211")
RECOMMENDED = {
    ("cpu", "x86_64", "linux"): [f"torch{t}-cxx11-cpu" for t in TORCHES],
    ("cpu", "aarch64", "linux"): [f"torch{t}-cxx11-cpu" for t in TORCHES],
    ("cpu", "aarch64", "darwin"): [f"torch{t}-cpu" for t in TORCHES],
    ("metal", "aarch64", "darwin"): [f"torch{t}-metal" for t in TORCHES],
    ("rocm", "x86_64", "linux"): [
        *(f"torch210-cxx11-{each}" for each in ("rocm70", "rocm71")),
        *(f"torch211-cxx11-{each}" for each in ("rocm71", "rocm72")),
    ],
    ("xpu", "x86_64", "linux"): [f"torch{t}-cxx11-xpu20253" for t in TORCHES],
}
for _processor in ("x86_64", "aarch64"):
    RECOMMENDED["cuda", _processor, "linux"] = [
        "torch29-cxx11-cu129",
        *(f"torch{t}-cxx11-{each}" for t in TORCHES for each in ("cu126", "cu128", "cu130")),
    ]


def build_folder(repository: Repository) -> Iterator[Finding]:
    """Require that build/ exists and has a variant; a repository of sources is checked as far as possible."""
    if not repository.variants and not repository.unreadable:
        has_build = (repository.folder / "build").is_dir()
        text = "has no variant; the place of one is build/<variant>/"
        if has_sources(repository):
            text = "has sources (build:), which a first use compiles, and no variant: build some to lock or publish it"
        yield Finding("build" if has_build else ".", 0, "layout", text)


def readable_files(repository: Repository) -> Iterator[Finding]:
    """Require that every file is a regular one, of the repository, and not too large; `forge kernels lock` reads all of
    them."""
    yield from repository.unreadable


def variant_names(repository: Repository) -> Iterator[Finding]:
    """Require that the folders in build/ are valid variant names."""
    is_alone = [each.path for each in repository.variants] == [""]
    for variant in repository.variants:
        problem = None if variant.is_source or is_alone else variant_problem(variant.name)
        if problem is not None:
            yield variant.finding("variant-name", f"is not the name of a variant: {problem}")


def recommended_variants(repository: Repository) -> Iterator[Finding]:
    """Recommend all variants that the Hub lists for each backend and system with at least one variant.

    A variant for torch's stable ABI serves every later torch, so none is missing if there is one.
    """
    built = [
        each for each in repository.variants if each.path and not each.is_noarch and variant_problem(each.name) is None
    ]
    systems: dict[tuple[str, str, str], list[Variant]] = {}
    for variant in built:
        parts = variant.name.split("-")
        systems.setdefault((str(variant.named_backend), parts[-2], parts[-1]), []).append(variant)
    for system, variants in systems.items():
        names = [each.name for each in variants]
        if any(name.startswith(("torch-stable-abi", "tvm-ffi")) for name in names):
            continue
        expected = [f"{each}-{system[1]}-{system[2]}" for each in RECOMMENDED.get(system, [])]
        if missing := [each for each in expected if each not in names]:
            text = f"for {' '.join(system)} the Hub recommends, and there is not: {', '.join(missing)}"
            yield Finding("build", 0, "recommended-variants", text, advice=True)


def package_init(repository: Repository) -> Iterator[Finding]:
    """Require that each variant is a package, with `__init__.py` in its folder or, in the older layout, in the inner
    folder."""
    for variant in repository.variants:
        name = variant.value("name", str)
        if variant.root is None:
            yield variant.finding("init", "has no __init__.py")
        elif variant.root and name is not None and variant.root != name.replace("-", "_"):
            text = f"is the package, but the kernel {name} wants {name.replace('-', '_')}/__init__.py"
            yield variant.finding("init", text, f"{variant.root}/__init__.py")


REQUIREMENTS = (build_folder, readable_files, variant_names, recommended_variants, package_init)
