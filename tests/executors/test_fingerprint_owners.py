"""The owners of code: files written by an installer are identified by their version."""

from pathlib import Path

import pytest

from forge.executors.fingerprint.owners import owner_of_file


@pytest.mark.parametrize("installed", [True, False])
def test_a_folder_of_the_path_with_distributions_is_installed(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install --target` makes such a folder, and PYTHONPATH names it: its packages are not read object by
    object."""
    (tmp_path / "acme").mkdir()
    if installed:
        metadata = tmp_path / "acme-1.5.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.5\n")
        (metadata / "RECORD").write_text("acme/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert owner_of_file(str(tmp_path / "acme" / "__init__.py")) == ("acme 1.5" if installed else None)
