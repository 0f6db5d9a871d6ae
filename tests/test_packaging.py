# SPDX-License-Identifier: Apache-2.0
"""The wheel beside torch and triton alone, and what an import of the kernels brings along."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FOREIGN = ("numpy", "transformers", "msgspec", "zmq", "pydantic", "typer", "rich", "safetensors", "vllm", "yaml")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("afd_kernels", "afd_runtime"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(source)]
    subprocess.run(command, check=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def bare_path(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A module search path with the wheel, torch, triton and what these two require: nothing else is importable."""
    target, beside = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("beside")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, str(wheel)], check=True)
    for name in _with_requirements("torch") | _with_requirements("triton"):
        _link(importlib.metadata.distribution(name), beside)
    return [str(target), str(beside)]


def _with_requirements(name: str) -> set[str]:
    found: set[str] = set()
    todo = [name]
    while todo:
        current = todo.pop()
        if current in found:
            continue
        try:
            lines = importlib.metadata.requires(current) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(current)
        needed = [Requirement(line) for line in lines]
        todo += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def _link(distribution: importlib.metadata.Distribution, beside: Path) -> None:
    for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
        if not (beside / top).exists():
            (beside / top).symlink_to(Path(str(distribution.locate_file(top))))


def _run(path: list[str], program: str, cwd: Path) -> str:
    """Runs ``program`` in an interpreter that sees the standard library and ``path`` only."""
    prelude = f"import sys; sys.path[:0] = {path!r}\n"
    command = [sys.executable, "-I", "-S", "-c", prelude + program]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_example_beside_torch_and_triton_alone(bare_path: list[str], tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None and "fused_experts" in example[1]
    assert len(example[1].splitlines()) <= 12
    out = _run(bare_path, example[1], tmp_path)
    assert out == "(16, 256) torch.float32\n"
    check = f"import importlib.util\nprint([m for m in {FOREIGN!r} if importlib.util.find_spec(m)])"
    assert _run(bare_path, check, tmp_path) == "[]\n", "the example ran beside more than torch and triton"


def test_import_is_light(bare_path: list[str], tmp_path: Path) -> None:
    program = """
import torch, triton
def refuse(*args, **kwargs):
    raise RuntimeError("the import touched CUDA")
for name in ("_lazy_init", "is_available", "device_count", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, refuse)
before = set(sys.modules)
import afd_kernels
print(afd_kernels.__file__)
print(sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""
    file, modules = _run(bare_path, program, tmp_path).splitlines()
    assert file.startswith(bare_path[0])
    new = set(re.findall(r"'(\w+)'", modules))
    assert "afd_kernels" in new and "afd_runtime" not in new and not new & set(FOREIGN)


def test_wheel_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert {"afd_kernels/py.typed", "afd_runtime/py.typed"} <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"afd_kernels", "afd_runtime"}
    configs = {str(p.relative_to(ROOT)) for p in (ROOT / "afd_kernels").rglob("*.json")}
    assert configs <= set(names)
    base = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert sorted(base) == ["Requires-Dist: torch>=2.9", "Requires-Dist: triton>=3.6"]
    assert "afd = afd_runtime.cli:main" in entry_points
