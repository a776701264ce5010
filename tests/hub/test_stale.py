"""Verdicts and builds apply only to the verified or built files, and only from trusted writers."""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from forge.executors.hubex import Verifier, gather
from forge.executors.hubex.fingerprint import fingerprint
from forge.executors.hubex.verification import verification_cache
from forge.executors.hubex.verification.messages import Answer, Question
from forge.hub import HubNotice, Policy
from forge.support import owner_only_store
from tests.hub.kernels import forget
from tests.hub.repositories import GELU

QUESTION = Question(torch.device("cpu"), torch.float32)


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a module that a policy lets kernels import."""
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    (tmp_path / "modules").mkdir()

    def write(text: str) -> None:
        for name in ("allowed_helper", "allowed_more"):
            sys.modules.pop(name, None)
        (tmp_path / "modules" / "allowed_helper.py").write_text(text)

    yield write
    sys.modules.pop("allowed_helper", None)


@pytest.mark.parametrize(
    "code",
    [
        "from allowed_helper import g\n\ndef f(x):\n    return g(x)\n",
        "import allowed_helper as h\n\ndef f(x):\n    return h.g(x)\n",
        "def f(x):\n    from allowed_helper import g\n    return g(x)\n",
    ],
)
def test_a_helper_that_the_policy_allows_is_a_part_of_the_kernel(
    repository: Callable, helper: Callable[[str], None], code: str
) -> None:
    made = repository("helped", code, **GELU)
    policy, digests = Policy(local=True, imports=("allowed_helper",)), set()
    for factor in (1, 2, 1):
        helper(f"import torch\n\ndef g(x):\n    return torch.nn.functional.gelu(x) * {factor}\n")
        __import__("allowed_helper")
        forget()
        digests.add(fingerprint(gather([made.folder], policy=policy)[0]).digest)
    assert len(digests) == 2


@pytest.fixture
def verdict(repository: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple:
    """Return a kernel, and the file with its verdict."""
    monkeypatch.setenv("FORGE_CACHE_DIR", str(tmp_path / "own"))
    answers = iter([Answer(None, 3), Answer("asked again")])
    monkeypatch.setattr(verification_cache.worker, "ask", lambda *rest: next(answers))
    [kernel] = gather([repository("kept", "def f(x):\n    return F.gelu(x)\n", **GELU).folder])
    assert Verifier().answer(kernel, QUESTION).reason is None
    [path] = (tmp_path / "own" / "verdicts").iterdir()
    return kernel, path


def test_a_verdict_on_disk_is_believed(verdict: tuple) -> None:
    assert Verifier().answer(verdict[0], QUESTION).reason is None


def _open_to_all(path: Path) -> None:
    path.chmod(0o666)


def _open_folder(path: Path) -> None:
    path.parent.chmod(0o777)


def _anothers(path: Path) -> None:
    os.chown(path, 12345, 12345)


def _linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _plain(path: Path) -> None:
    path.write_text(json.dumps({"answer": {"reason": None, "accepted": 9}}))


@pytest.mark.parametrize("change", [_open_to_all, _open_folder, _anothers, _linked, _plain])
def test_a_verdict_that_others_may_have_written_is_refused(verdict: tuple, change: Callable[[Path], None]) -> None:
    if change is _anothers and os.getuid() != 0:
        pytest.skip("only root gives files away")
    change(verdict[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HubNotice)
        assert Verifier().answer(verdict[0], QUESTION).reason == "asked again"


def test_a_verdict_of_another_question_is_refused(verdict: tuple) -> None:
    """The file was moved to another's name."""
    kernel, path = verdict
    other = Question(torch.device("cpu"), torch.float64)
    key = verification_cache._key(kernel, fingerprint(kernel), other)
    body = owner_only_store.read(path, verification_cache.HEAD)
    owner_only_store.write(path.with_name(f"{key}.verdict"), verification_cache.HEAD, body, verification_cache.SIZE)
    assert Verifier().answer(kernel, other).reason == "asked again"
