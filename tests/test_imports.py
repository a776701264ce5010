"""Import cycles: none has more than three files, so that a file is read without knowing the others."""

from collections.abc import Iterable

import grimp

LONGEST = 3

Graph = dict[str, list[str]]


def test_no_circle_of_imports_has_more_than_three_files() -> None:
    """An import in a function counts, and one under TYPE_CHECKING does not, because Python never runs it."""
    circles = find_circles(imports_of_forge())
    assert [each for each in circles if len(each) > LONGEST] == []


def test_a_circle_through_the_init_of_a_package_is_found() -> None:
    graph = with_packages({"a": ["a.b"], "a.b": ["c"], "c": ["d"], "d": ["a.e"], "a.e": []})
    assert graph["d"] == ["a", "a.e"]
    assert find_circles(graph) == [["a", "a.b", "c", "d"]]


def imports_of_forge() -> Graph:
    graph = grimp.build_graph("forge", exclude_type_checking_imports=True, cache_dir=None)
    return with_packages({module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)})


def with_packages(imported: dict[str, Iterable[str]]) -> Graph:
    """Add the packages around each imported module, which Python imports before it: those around the importing module
    have begun to be imported."""
    graph = {}
    for module, direct in imported.items():
        begun = {module, *packages_of(module)}
        graph[module] = sorted({each for name in direct for each in (name, *packages_of(name))} - begun)
    return graph


def packages_of(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def find_circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components with several modules (Kosaraju)."""
    importers: Graph = {module: [] for module in graph}
    for module, imported in graph.items():
        for each in imported:
            importers[each].append(module)
    seen: set[str] = set()
    order = [module for start in graph for module in reached_from(start, graph, seen)]
    seen.clear()
    circles = [sorted(reached_from(start, importers, seen)) for start in reversed(order)]
    return [circle for circle in circles if len(circle) > 1]


def reached_from(start: str, graph: Graph, seen: set[str]) -> list[str]:
    """Return the reachable unseen modules, each after those that are reached from it."""
    if start in seen:
        return []
    seen.add(start)
    return [*(module for each in graph[start] for module in reached_from(each, graph, seen)), start]
