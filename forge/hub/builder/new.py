"""The template of a source tree: it builds, conforms and verifies before its author changes anything.

The files are in templates/: those shared by all kernels in common/, and those of each kind in a folder of its name.
`@module@` and the other placeholders are replaced in the files' text and names.
"""

import keyword
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from forge.hub.builder.config import NAME, NAME_FORM
from forge.hub.errors import HubError

KINDS = ("cpp", "triton")
# Names that a kernel's code imports, and names that the templates below define.
_MODULES = frozenset({"torch", "triton", "forge", "kernels", *sys.stdlib_module_names})
_TEMPLATES = Path(__file__).with_name("templates")
_TAKEN = frozenset({"kernel", "ops", "reference", "run"})
_CPP = frozenset(
    """
    alignas alignof and_eq asm auto bitand bitor bool case catch char char8_t char16_t char32_t co_await co_return
    co_yield compl concept const consteval constexpr constinit const_cast decltype default delete do double
    dynamic_cast enum explicit export extern float friend goto inline int long main mutable namespace new noexcept
    not_eq nullptr operator or_eq private protected public register reinterpret_cast requires short signed sizeof
    static static_assert static_cast std struct switch template this thread_local throw typedef typeid typename union
    unsigned using virtual void volatile wchar_t xor xor_eq
    """.split()
)

_WORDS: Mapping[str, Mapping[str, str]] = {
    "cpp": {
        "source": "@module@_cpu/",
        "device": "cpu",
        "dtypes": "[float32]",
        "tolerances": "",
        "requires": "",
    },
    "triton": {
        "source": "torch-ext/@module@/kernel.py",
        "device": "cuda",
        "dtypes": "[float32, bfloat16, float16]",
        "tolerances": ", bfloat16: [1.6e-2, 1e-2], float16: [2e-3, 2e-3]",
        "requires": ", python: [triton]",
    },
}


def write_new(name: str, folder: Path, kind: str = "cpp") -> list[Path]:
    """Write a source tree of a kernel `name`, in C++ for CPUs ("cpp") or in Triton ("triton"); return its files.

    Raises: HubError for a name that the Hub does not accept, an unknown kind, or a folder that is not empty.
    """
    if kind not in KINDS:
        raise HubError(f"{kind!r} is no kind of kernel: known are {', '.join(KINDS)}")
    if problem := _problem(name, kind):
        raise HubError(f"{name!r} is no name of a kernel: it {problem}, such as fast-gelu")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HubError(f"{folder}: is there already, and not empty; nothing was written")
    words = {"name": name, "module": name.replace("-", "_")}
    words |= {key: _fill_in(text, words) for key, text in _WORDS[kind].items()}
    files = []
    for path, text in (*_templates("common"), *_templates(kind)):
        file = folder / _fill_in(path, words)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_fill_in(text, words))
        files.append(file)
    return files


def _templates(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the path in the tree and the text of each template of a kind."""
    root = _TEMPLATES / kind
    for file in sorted(root.rglob("*.in")):
        yield file.relative_to(root).as_posix().removesuffix(".in"), file.read_text()


def _fill_in(text: str, words: Mapping[str, str]) -> str:
    return re.sub("@([a-z]+)@", lambda match: words[match[1]], text)


def _problem(name: str, kind: str) -> str | None:
    """Return the reason why a tree of this name would not build, conform or load, or None."""
    module = name.replace("-", "_")
    if not NAME.fullmatch(name):
        return f"must be {NAME_FORM}"
    if keyword.iskeyword(module):
        return "is a keyword of Python; take another one"
    if kind == "cpp" and module in _CPP:
        return "is a word of C++; take another one"
    if module in _MODULES:
        return "is the name of a module that kernels import; take another one"
    if module in _TAKEN:
        return "is the name of a part of every kernel; take another one"
    return None
