"""The pipeline is data: the order of its passes is legal, and a trace goes through it in that order."""

import ast
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import forge
from forge.compiler import passes, pipeline
from forge.compiler.pipeline import PIPELINE, Form, Pass
from forge.ir import Trace


def test_forms_follow_each_other() -> None:
    """A pass takes a form that the previous ones leave, and does not leave an earlier one."""
    reachable = {Form.TORCH}
    for each in PIPELINE:
        assert each.takes in reachable, each.run.__name__
        assert each.gives is None or each.gives >= each.takes, each.run.__name__
        reachable.add(each.takes if each.gives is None else each.gives)
    assert max(reachable) is Form.CODE


def test_each_pass_says_what_it_does() -> None:
    assert [each.run.__name__ for each in PIPELINE if not each.run.__doc__] == []


def test_passes_of_the_module_are_all_in_the_pipeline() -> None:
    public = {name for name, value in vars(passes).items() if getattr(value, "__module__", None) == passes.__name__}
    assert {name for name in public if not name.startswith("_")} == {each.run.__name__ for each in PIPELINE}


def test_no_pass_decides_itself_not_to_run() -> None:
    """A pass that returns its trace unchanged under a condition has that condition in its row."""
    functions = [
        each for each in ast.parse(Path(passes.__file__).read_text()).body if isinstance(each, ast.FunctionDef)
    ]
    names = {each.run.__name__ for each in PIPELINE}
    assert [each.name for each in functions if each.name in names and any(conditional_returns(each))] == []


def conditional_returns(function: ast.FunctionDef) -> Iterator[bool]:
    """Yield, for each condition of a function, whether it returns the function's trace unchanged."""
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.Match | ast.For | ast.While):
            yield any(isinstance(each, ast.Return) and is_trace(each.value) for each in ast.walk(node))
        elif isinstance(node, ast.IfExp):
            yield is_trace(node.body) or is_trace(node.orelse)


def is_trace(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Name) and node.id == "trace"


def test_a_pass_without_a_condition_has_work_in_every_trace() -> None:
    always = [each.run.__name__ for each in PIPELINE if each.when is pipeline._always]
    assert always == ["claim", "fuse", "lifetimes", "codegen"]


def test_who_runs_a_pass_outside_of_the_pipeline_is_named_there() -> None:
    root = Path(forge.__file__).parent
    inside = {root / "transforms" / "__init__.py", Path(passes.__file__)}
    users = [path for path in root.rglob("*.py") if path not in inside and not imported_passes(path).isdisjoint(ALONE)]
    assert pipeline.__doc__ is not None
    assert [path.name for path in users if f"{path.parent.name}/{path.name}" not in pipeline.__doc__] == []


ALONE = {
    "cse",
    "dce",
    "delete_last_used",
    "differentiate",
    "fold_constants",
    "rematerialize",
    "claim_calls",
    "fuse_claimed",
}


def imported_passes(path: Path) -> set[str]:
    imports = [each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.ImportFrom)]
    named = [each for each in imports if (each.module or "").startswith(("forge.transforms", "forge.compiler"))]
    return {name.name for each in named for name in each.names}


def test_a_pass_that_is_added_runs_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(trace, context):
        seen.append((context.kind.name, trace.stage))
        return trace

    added = Pass(spy, Form.TORCH, pipeline._always, "optimize")
    place = next(i for i, each in enumerate(PIPELINE) if each.run is passes.gradient_rules)
    monkeypatch.setattr(pipeline, "PIPELINE", (*PIPELINE[:place], added, *PIPELINE[place:]))
    x = torch.randn(3, requires_grad=True)
    forge.jit(lambda x: x.relu() * 2, executors=["torch"], cache=False)(x).sum().backward()
    assert seen == [("PROGRAM", "fold_constants")] or seen == [("PROGRAM", "cse")]


def test_a_stage_has_the_name_of_the_pass_that_made_it() -> None:
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    jitted = forge.jit(lambda x, weight: ((x @ weight).sin().exp() + torch.ones(4)).sum(), cache=False)
    jitted(x, weight).backward()
    first, *stages = [trace.stage for trace in forge.last_traces(jitted)]
    assert first == "recorded from Dynamo"
    assert {"differentiate", "split", "claim", "fuse"}.issubset(stages)
    assert stages == [each.run.__name__ for each in PIPELINE if each.is_stage and each.run.__name__ in stages]
    assert [trace.stage for trace in forge.last_backward_traces(jitted)][1:] == ["claim", "fuse", "lifetimes"]


def test_a_pass_that_names_its_stage_otherwise_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def tidy(trace, context):
        return trace.derive("tidied", trace.bound_symbols)

    added = Pass(tidy, Form.TORCH, pipeline._always, "optimize")
    monkeypatch.setattr(pipeline, "PIPELINE", (added, *PIPELINE))
    with pytest.raises(AssertionError, match="pass tidy names its stage 'tidied'"):
        forge.jit(lambda x: x.relu(), executors=["torch"], cache=False)(torch.randn(3))


def test_the_second_tier_is_the_same_passes_with_another_config() -> None:
    config = forge.api.options.resolve_options()
    second = config.larger_regions()
    assert type(second) is type(config) and second.memory == config.memory
    assert len(second.executors) == len(config.executors)


def test_twelve_calls_lead_to_the_code_of_a_forward_and_fourteen_to_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls are listed in docs/explanation/architecture.md; torch's calls between them are not counted."""
    root, generate = Path(forge.__file__).parent, Trace.python_callable
    paths: list[list[str]] = []

    def python_callable(trace: Trace) -> Callable:
        frames = [each for each in traceback.extract_stack() if Path(each.filename).is_relative_to(root)]
        paths.append([each.name for each in frames])
        return generate(trace)

    monkeypatch.setattr(Trace, "python_callable", python_callable)
    forge.jit(torch.nn.Linear(2, 2), cache=False)(torch.ones(1, 2))
    assert [len(path) + 1 for path in paths] == [12, 14], paths
