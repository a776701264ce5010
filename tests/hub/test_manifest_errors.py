"""Errors in manifests: each with its line, its column and a suggestion."""

from typing import Any

import pytest
import torch

from forge.hub.manifest import ManifestError, parse
from tests.hub.manifests import VALID, entry, problems, read

HEAD = "forge_kernels: 1\nlibrary: {name: acme}\nops:\n"


def op(*lines: str) -> str:
    """Return a manifest of one entry, which begins at line 4."""
    return HEAD + "\n".join(f"{'- ' if i == 0 else '  '}{line}" for i, line in enumerate(lines)) + "\n"


KERNEL = "kernels: [{kernel_name: acme::k}]"
GRAMMAR = (
    "is not an allowed expression; there are numbers, names, tensor.shape[0], arithmetic, comparisons, and, or, not"
)

ERRORS = {
    "misspelt operator": (
        op("op: aten::ad.out", KERNEL),
        "4:7: unknown operator 'aten::ad.out'; did you mean 'aten::add.out'?",
    ),
    "misspelt namespace": (
        op("op: atn::add.out", KERNEL),
        "4:7: unknown operator 'atn::add.out'; did you mean 'aten::add.out'?",
    ),
    "torch function of another module": (
        op("op: torch.nn.gelu", KERNEL),
        "4:7: unknown operator 'torch.nn.gelu'; did you mean 'torch.nn.functional.gelu'?",
    ),
    "misspelt base of an overload": (
        op("op: aten::conv1.out", KERNEL),
        "4:7: unknown operator 'aten::conv1.out'; did you mean 'aten::",
    ),
    "misspelt operator of ExecuTorch": (
        "- op: ad.out\n  kernels:\n  - {arg_meta: null, kernel_name: k}\n",
        "1:7: unknown operator 'aten::ad.out'; did you mean 'aten::add.out'?",
    ),
    "misspelt torch function": (
        op("op: torch.nn.functional.rms_nrm", KERNEL),
        "4:7: unknown operator 'torch.nn.functional.rms_nrm'; did you mean 'torch.nn.functional.rms_norm'?",
    ),
    "operator without its overload": (
        op("op: aten::add", KERNEL),
        "4:7: unknown operator 'aten::add'; did you mean 'aten::add.",
    ),
    "operator without its namespace": (
        op("op: add.out", KERNEL),
        "4:7: unknown operator 'add.out'; did you mean 'aten::add.out'?",
    ),
    "misspelt key": (
        op("op: aten::add.out", "kernels:", "- {kernal_name: k}"),
        "6:6: unknown key 'kernal_name' in kernels[0]; did you mean 'kernel_name'?",
    ),
    "misspelt key of the file": (
        HEAD.replace("library", "libary"),
        "2:1: unknown key 'libary' in the manifest; did you mean 'library'?",
    ),
    "key that is like none": (
        op("op: aten::add.out", KERNEL, "zzz: 1"),
        "6:3: unknown key 'zzz' in ops[0]; known: op, func, pattern, kernels, ",
    ),
    "duplicate key": (
        op("op: aten::add.out", "op: aten::mul.out", KERNEL),
        "5:3: duplicate key 'op' (first at line 4)",
    ),
    "duplicate kernel": (
        op("op: aten::add.out", "kernels:", "- {name: a, kernel_name: k}", "- {name: b, kernel_name: l}"),
        "7:5: duplicate kernel for aten::add.out: 'a' (line 6) and 'b' (line 7) accept the same inputs; "
        "constrain one, or give them different priorities",
    ),
    "duplicate kernel under other aliases": (
        op(
            "op: aten::add.out",
            "type_alias: {T: [Float], U: [float32]}",
            "kernels:",
            "- {name: a, kernel_name: k, arg_meta: {self: T, other: T}}",
            "- {name: b, kernel_name: l, arg_meta: {self: U, other: U}}",
        ),
        "8:5: duplicate kernel for aten::add.out: 'a' (line 7) and 'b' (line 8) accept the same inputs; "
        "constrain one, or give them different priorities",
    ),
    "name taken": (
        op("op: aten::add.out", "kernels:", "- {name: a, kernel_name: k}", "- {name: a, kernel_name: l, priority: 1}"),
        "7:5: the name 'a' is taken by the kernel at line 6 of aten::add.out",
    ),
    "no target": (op("kernels: []"), "4:3: exactly one of 'op', 'func' and 'pattern' is required"),
    "two targets": (
        op("op: aten::add.out", "pattern: swiglu", KERNEL),
        "4:3: exactly one of 'op', 'func' and 'pattern' is required; given: op, pattern",
    ),
    "unknown argument": (
        entry(arg_meta="{nosuch: T1}"),
        "9:16: arg_meta names 'nosuch', not an argument of aten::add.out; tensor arguments: self, other, out",
    ),
    "misspelt argument": (
        entry(shape='{othr: "[H]"}'),
        "9:13: shape names 'othr', not an argument of aten::add.out; tensor arguments: self, other, out; "
        "did you mean 'other'?",
    ),
    "argument that is no tensor": (
        entry(arg_meta="{alpha: T1}"),
        "9:16: arg_meta names 'alpha', not a tensor argument of aten::add.out; tensor arguments: self, other, out",
    ),
    "undefined type alias": (entry(arg_meta="{self: T0}"), "9:22: undefined type alias 'T0'; defined: T1"),
    "undefined dim order alias": (
        entry(arg_meta="{self: [T1, D0]}"),
        "9:27: undefined dim order alias 'D0'; defined: D",
    ),
    "result that there is not": (
        entry(arg_meta="{__ret_1: T1}"),
        "9:16: arg_meta names '__ret_1', but aten::add.out has 1 results",
    ),
    "unknown dtype": (
        op("op: aten::add.out", "type_alias: {T: [Flot]}", KERNEL),
        "5:20: unknown dtype 'Flot'; did you mean 'Float'?",
    ),
    "dim order that is no permutation": (
        op("op: aten::add.out", "dim_order_alias: {D: [0, 0, 2]}", KERNEL),
        "5:24: dim order [0, 0, 2] is not a permutation of 0..2",
    ),
    "nested dim order that is no permutation": (
        op("op: aten::add.out", "dim_order_alias: {D: [[0, 1], [1, 2]]}", KERNEL),
        "5:33: dim order [1, 2] is not a permutation of 0..1",
    ),
    "misspelt dim order": (
        op("op: aten::add.out", "dim_order_alias: {C: contigous}", KERNEL),
        "5:24: unknown dim order 'contigous'; did you mean 'contiguous'?",
    ),
    "schema that does not parse": (
        op("func: 'acme::f(Tensor x -> Tensor'", KERNEL),
        "4:9: invalid schema: expected ) but found 'arrow' here:\n"
        "acme::f(Tensor x -> Tensor\n                 ~~ <--- HERE",
    ),
    "schema without a namespace": (
        op("func: f(Tensor x) -> Tensor", KERNEL),
        "4:9: invalid schema: the name 'f' has no namespace; write acme::f",
    ),
    "schema in torch's namespace": (
        op("func: aten::f(Tensor x) -> Tensor", KERNEL),
        "4:9: invalid schema: the namespace 'aten' is torch's own; use one of your own",
    ),
    "schema of a wrong out-variant": (
        op("func: 'acme::f.out(Tensor x, *, Tensor(a!) out) -> Tensor'", KERNEL),
        "4:9: invalid schema: result 0 is not an out argument; an out-variant returns Tensor(a!)",
    ),
    "schema of an out-variant without out": (
        op("func: acme::f.out(Tensor x) -> Tensor", KERNEL),
        "4:9: invalid schema: the overload 'out' has no out argument: write *, Tensor(a!) out",
    ),
    "schema with one name twice": (
        op("func: 'acme::f(Tensor x, Tensor x) -> Tensor'", KERNEL),
        "4:9: invalid schema: two arguments are called 'x'",
    ),
    "schema with a default of another type": (
        op("func: acme::f(Tensor x, int n=1.5) -> Tensor", KERNEL),
        "4:9: invalid schema: the default 1.5 of 'n' is no integer",
    ),
    "schema that returns nothing": (
        op("func: acme::f(Tensor x) -> ()", KERNEL),
        "4:9: invalid schema: it returns nothing and writes to nothing",
    ),
    "schema that writes in place": (
        op("func: acme::f(Tensor(a!) x) -> Tensor(a!)", KERNEL),
        "4:9: invalid schema: 'x' is changed in place; only keyword-only out arguments may be written to",
    ),
    "func declared twice": (
        op("func: acme::f(Tensor x) -> Tensor", KERNEL, "").rstrip()
        + "\n- func: acme::f(Tensor x) -> Tensor\n  "
        + KERNEL,
        "6:9: func 'acme::f' is declared twice",
    ),
    "fake of an operator that exists": (
        op("op: aten::add.out", "fake: 'python:m:f'", KERNEL),
        "5:3: 'fake' belongs to a 'func': an op has it already",
    ),
    "unknown pattern": (
        op("pattern: swigl", KERNEL),
        "4:12: unknown pattern 'swigl'; did you mean 'swiglu'?",
    ),
    "where with a call": (entry(where='["len(x)"]'), f"9:13: where: 'len(x)' {GRAMMAR}"),
    "where with an attribute": (
        entry(where='["self.ndim == 2 and self.__class__"]'),
        f"9:13: where: 'self.__class__' {GRAMMAR}",
    ),
    "where that does not parse": (entry(where='"H %"'), "9:12: where: 'H %' is not an expression: invalid syntax"),
    "where about a name that is not there": (
        entry(shape='{self: "[..., HID]"}', where='["HIB % 8 == 0"]'),
        "10:13: where: 'HIB' in 'HIB % 8 == 0' is neither an argument nor a named dim; did you mean 'HID'?",
    ),
    "where about a tensor's value": (
        entry(where='["self > 0"]'),
        "9:13: where: 'self' in 'self > 0' is a tensor: compare it with None, or use self.dtype, self.ndim, "
        "self.numel, self.shape",
    ),
    "where with is": (
        entry(where='["alpha is 1"]'),
        "9:13: where: 'alpha is 1' is not an allowed expression; `is` goes with None, True or False",
    ),
    "shape without brackets": (
        entry(shape='{self: "B, S"}'),
        "9:19: shape 'B, S' is no pattern; write it as \"[..., H]\"",
    ),
    "shape with two ellipses": (
        entry(shape='{self: "[..., H, ...]"}'),
        "9:19: shape [..., H, ...] has more than one '...'",
    ),
    "shape with an expression": (
        entry(shape='{self: "[H+1]"}'),
        "9:19: shape [H+1]: 'H+1' is no dim; a dim is a name, a length, a name times a number, _ or ...",
    ),
    "dim with an argument's name": (
        entry(shape='{self: "[alpha]"}'),
        "9:19: shape [alpha]: the dim 'alpha' has the name of an argument; rename the dim",
    ),
    "unknown device": (entry(device="cudaa"), "9:13: unknown device type 'cudaa'; did you mean 'cuda'?"),
    "capability of a CPU": (
        entry(device='{type: cpu, capability: ">=8.0"}'),
        "9:37: capability is of cuda devices, but the device type is cpu",
    ),
    "capability that is no range": (
        entry(device='{type: cuda, capability: "8+"}'),
        "9:38: capability is '8+', but must be a version range such as '>=8.0' or '>=8.0,<10'",
    ),
    "kernel name of no form": (
        op("op: aten::add.out", "kernels:", "- kernel_name: 'acme:rms'"),
        "6:18: kernel_name is 'acme:rms', but must be 'function', 'ns::name', 'python:module:function' "
        "or 'hub:org/repo:function'",
    ),
    "no kernel name": (op("op: aten::add.out", "kernels: [{arg_meta: null}]"), "5:13: kernels[0] has no 'kernel_name'"),
    "no kernels": (op("op: aten::add.out"), "4:3: ops[0] has no 'kernels'"),
    "priority that is no number": (
        entry(priority="high"),
        "9:15: priority is 'high', but must be a whole number",
    ),
    "args with an unknown argument": (
        entry(args="{x: self, y: othr}", out="out"),
        "9:24: args gives 'othr', not an argument of aten::add.out; did you mean 'other'?; "
        "a text is written {constant: othr}",
    ),
    "args without a required argument": (
        entry(args="{x: self}", out="out"),
        "9:5: args leaves out 'other', which has no default: pass it, or say in where what it must be",
    ),
    "args without the out": (
        entry(args="{x: self, y: other}"),
        "9:5: args does not say where out goes; use out:",
    ),
    "out that is no parameter": (
        entry(out="-1"),
        "9:10: out is -1, but must be the name or the position of the kernel's out parameter",
    ),
    "more outs than results": (
        entry(out="[a, b]"),
        "9:5: out names 2 parameters, but aten::add.out has 1 results",
    ),
    "align that is no power of two": (
        entry(align="12"),
        "9:12: align is 12, but must be a power of two of at most 4096, in bytes",
    ),
    "layout that is none": (
        entry(layout="contigous"),
        "9:13: layout is 'contigous', but must be contiguous or channels_last or channels_last_3d; "
        "did you mean 'contiguous'?",
    ),
    "grad of torch's autograd with memory to write to": (
        entry(grad="autograd", out="out"),
        "9:5: grad: autograd is of kernels that return their result; one that writes to out has no graph",
    ),
    "misspelt grad of torch's autograd": (
        entry(grad="autogard"),
        "9:11: unknown grad 'autogard'; did you mean 'autograd'?",
    ),
    "misspelt grad": (entry(grad="composit"), "9:11: unknown grad 'composit'; did you mean 'composite'?"),
    "grad of a func without a reference": (
        op("func: acme::f(Tensor x) -> Tensor", "kernels:", "- {kernel_name: k, grad: composite}"),
        "6:28: grad: composite derives from a reference, but acme::f has none; add reference:",
    ),
    "tolerance that is no pair": (
        entry(tolerance="{float16: 0.1}"),
        "9:26: tolerance of float16 is 0.1, but must be [rtol, atol]",
    ),
    "tolerance below 0": (
        entry(tolerance="{float16: [0.1, -1]}"),
        "9:32: tolerance of float16 is -1, but must be a number of at least 0",
    ),
    "version of another forge": (
        VALID.replace("forge_kernels: 1", "forge_kernels: 2"),
        "1:16: forge_kernels is 2, but must be 1, the version of manifests that this forge reads",
    ),
    "requires that is no range": (
        VALID.replace('">=2.11"', "new"),
        "3:19: requires torch is 'new', but must be a version range such as '>=2.11'",
    ),
    "requires that is no package": (
        VALID.replace("[einops]", "['a b c']"),
        "3:38: requires python is 'a b c', but must be packages such as einops or 'einops>=0.7'",
    ),
    "absolute source": (
        VALID.replace("csrc/rms.cpp", "/etc/passwd"),
        "4:15: build cpp '/etc/passwd' must be a path inside of the manifest's folder",
    ),
    "source above the folder": (
        VALID.replace("csrc/rms.cpp", "csrc/../../x.cpp"),
        "4:15: build cpp 'csrc/../../x.cpp' must be a path inside of the manifest's folder",
    ),
    "text where a number is wanted": (
        VALID.replace("name: acme.norms", "name: 12"),
        "2:17: library name is 12, but must be text; put it in quotes",
    ),
    "list where a mapping is wanted": (
        VALID.replace("{name: acme.norms, priority: 10}", "[acme]"),
        "2:10: library is a list, but must be a mapping with the keys name, priority",
    ),
    "empty file": ("", "1:1: the manifest is empty; it begins with forge_kernels: 1"),
    "only a comment": ("# nothing\n", "1:1: the manifest is empty; it begins with forge_kernels: 1"),
    "text": ("hello", "1:1: the manifest is 'hello', but must be a mapping with the keys "),
    "not YAML": (
        "a: [1, 2",
        "1:9: not YAML: expected ',' or ']', but got '<stream end>' (while parsing a flow sequence",
    ),
    "tab": ("\ta: 1", "1:1: not YAML: found character '\\t' that cannot start any token"),
    "control character": ("forge_kernels: 1\nab\x01", "2:3: not YAML: special characters are not allowed"),
    "not UTF-8": (b"forge_kernels: 1\nab\xff", "2:3: not UTF-8: invalid start byte"),
    "alias": (
        "a: &x 1\nb: *x",
        "1:4: anchors and aliases (& and *) are not read here; write the value out, or quote it",
    ),
    "tag": (
        "a: !!python/object:os.system x",
        "1:4: the tag 'tag:yaml.org,2002:python/object:os.system' is not read here",
    ),
    "two documents": (VALID + "---\na: 1\n", "36:1: a second document: a manifest is one"),
    "deep nesting": ("[" * 100 + "]" * 100, "1:33: nested deeper than 32 levels"),
    "key that is a list": ("[a]: b", "1:1: a key must be text"),
    "huge file": ("#" * (1 << 20) + "\n", "1:1: the file has more than 1048576 bytes, too many for a manifest"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_says_where_and_what(name: str) -> None:
    text, wanted = ERRORS[name]
    found = problems(text)
    assert any(problem.startswith(f"k.yaml:{wanted}") for problem in found), found


WITH_COMPANIONS = {
    # one mistake that is two problems, because nothing nested in it can be read
    "misspelt key of the file",
    "text",
    "alias",
    "tag",
    "two documents",
    "deep nesting",
    "key that is a list",
    "list where a mapping is wanted",
}


@pytest.mark.parametrize("name", sorted(ERRORS.keys() - WITH_COMPANIONS))
def test_one_mistake_is_one_problem(name: str) -> None:
    assert len(problems(ERRORS[name][0])) == 1, problems(ERRORS[name][0])


def test_the_valid_manifest_has_no_problem() -> None:
    assert problems(VALID) == []


def test_all_problems_are_reported_at_once_in_the_order_of_the_file() -> None:
    text = VALID
    for right, wrong in {
        "name: acme.norms": "nam: acme.norms",
        "rms_norm": "rms_nrm",
        "[float16, bfloat16]": "[float16, Flot]",
        "kernel_name: acme::rms\n": "kernal_name: acme::rms\n",
        "H % 8 == 0": "len(x)",
        "float factor=1.0)": "float factor=1.0",
    }.items():
        assert right in text
        text = text.replace(right, wrong)
    found = problems(text)
    assert [problem.split(": ")[0] for problem in found] == [
        "k.yaml:2:11",
        "k.yaml:6:7",
        "k.yaml:7:29",
        "k.yaml:11:5",
        "k.yaml:16:13",
        "k.yaml:24:9",
    ]


def test_an_error_is_a_value_error_with_its_problems() -> None:
    with pytest.raises(ValueError) as caught:
        read(entry(priority="high"))
    assert isinstance(caught.value, ManifestError)
    (problem,) = caught.value.problems
    assert (problem.mark.line, problem.mark.column, problem.text) == (
        9,
        15,
        "priority is 'high', but must be a whole number",
    )


@pytest.mark.parametrize("text", [VALID, *[text for text, _ in ERRORS.values()]])
@pytest.mark.one_in(5)
def test_errors_are_the_same_without_libyaml(text: str | bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    found = problems(text)
    monkeypatch.setattr(parse, "_QUICK_LOADER", "SafeLoader")
    assert problems(text) == found


# lookup of kernels


def find(name: str) -> Any:
    """Return kernels like a loader."""
    return {
        "acme::rms": lambda x, w, epsilon, mode, *, result: result,
        "python:acme.ref:rms": torch.nn.functional.rms_norm,
        "python:acme.ref:scale": lambda x, factor: x,
        "acme::scale": lambda x, factor: x,
        "acme::scale_backward": lambda grad, factor: grad,
        "python:acme.patterns:swiglu": lambda x: x,
        "acme::swiglu": lambda out, x: out,
        "acme::add_out": torch.ops.aten.add.out,
    }[name]


def test_kernels_are_looked_for_when_a_finder_is_given() -> None:
    assert problems(VALID, find) == []


def test_a_kernel_that_is_not_found_says_why() -> None:
    def missing(name: str) -> Any:
        if name == "acme::rms":
            raise ImportError("librms.so: undefined symbol: _ZN3c10")
        return find(name)

    assert problems(VALID, missing) == [
        "k.yaml:10:5: kernel 'acme::rms' not found: ImportError: librms.so: undefined symbol: _ZN3c10"
    ]


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x, w, mode, *, result: x, "its signature does not accept 'epsilon'"),
        (lambda x, w, epsilon, mode, *, result, extra: x, "its signature needs 'extra', which it is not given"),
        (lambda x, w, epsilon, mode: x, "its signature does not accept 'result'"),
        (torch.ops.aten.add.Tensor, "its signature does not accept 'x'"),
    ],
)
def test_a_kernel_whose_signature_does_not_fit_says_what(function: Any, wanted: str) -> None:
    found = problems(VALID, lambda name: function if name == "acme::rms" else find(name))
    assert f"k.yaml:10:5: kernel 'acme::rms': {wanted}" in found


def test_a_kernel_that_takes_fewer_positions_names_what_is_left() -> None:
    found = problems(VALID, lambda name: (lambda input: input) if name == "python:acme.ref:rms" else find(name))
    assert found == [
        "k.yaml:23:5: kernel 'python:acme.ref:rms': its signature does not accept 'normalized_shape', 'weight', 'eps'; "
        "it is called with (input, normalized_shape, weight, eps), and takes (input): args says what it is given"
    ]


def test_a_kernel_that_takes_arguments_by_other_positions_names_the_one_that_it_does_not_take() -> None:
    found = problems(
        VALID, lambda name: (lambda weight, eps, input: 0) if name == "python:acme.ref:rms" else find(name)
    )
    (problem,) = found
    assert "does not accept 'normalized_shape'; it is called with (input, normalized_shape, weight, eps)" in problem


def test_a_pattern_that_is_not_found_says_why() -> None:
    def missing(name: str) -> Any:
        if name.startswith("python:acme.patterns"):
            raise ModuleNotFoundError("No module named 'acme'")
        return find(name)

    assert problems(VALID, missing) == [
        "k.yaml:29:12: pattern 'python:acme.patterns:swiglu' not found: ModuleNotFoundError: No module named 'acme'"
    ]


def test_a_patterns_arguments_are_checked_once_it_is_found() -> None:
    text = VALID.replace(
        "{kernel_name: acme::swiglu, out: 0}", "{kernel_name: acme::swiglu, arg_meta: {y: int32}, out: 0}"
    )
    assert problems(text) == []
    assert problems(text, find) == [
        "k.yaml:31:44: arg_meta names 'y', not an argument of python:acme.patterns:swiglu; tensor arguments: x"
    ]
