"""The place of a manifest: in the variant, the only part that is fetched; a folder may have its source at the root."""

from pathlib import Path

import pytest

from forge import hub
from forge.executors.hubex import gather
from forge.testing.hub_server import Hub
from tests.hub.kernels import kernel, write

PATH = "build/torch-universal/forge_kernels.yaml"


def manifest(priority: int = 1) -> str:
    entry = f"{{name: double, kernel_name: double, priority: {priority}, args: {{x: input}}}}"
    return f"forge_kernels: 1\nlibrary: {{name: acme}}\nops:\n- op: torch.nn.functional.relu\n  kernels:\n  - {entry}\n"


def test_a_published_repository_registers_by_being_loaded(server: Hub) -> None:
    server.publish("acme/rms", kernel({"forge_kernels.yaml": manifest()}))
    (found,) = gather(["acme/rms@v1"])
    assert found.name == "acme.double" and found.function(3) == 6


def test_a_published_repository_without_one_is_an_error_that_names_its_place(server: Hub) -> None:
    server.publish("acme/rms", kernel())
    with pytest.raises(hub.NotFoundError, match=r"acme/rms \(commit .* has no forge_kernels\.yaml.*; .*" + PATH):
        gather(["acme/rms@v1"])


def test_a_folder_may_have_it_at_its_root(tmp_path: Path) -> None:
    write(tmp_path, kernel())
    with pytest.raises(hub.NotFoundError, match=r"has no forge_kernels\.yaml"):
        gather([tmp_path])
    (tmp_path / "forge_kernels.yaml").write_text(manifest())
    assert [each.name for each in gather([tmp_path])] == ["acme.double"]


def test_a_copy_that_is_not_as_its_source_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, kernel({"forge_kernels.yaml": manifest()}))
    (tmp_path / "forge_kernels.yaml").write_text(manifest())
    assert [each.name for each in gather([tmp_path])] == ["acme.double"]
    (tmp_path / "forge_kernels.yaml").write_text(manifest(2))
    with pytest.raises(hub.MalformedError, match=f"{PATH} is not as .*, of which it is a copy; build the repository"):
        gather([tmp_path])
