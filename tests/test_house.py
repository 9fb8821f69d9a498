"""The habits of the house, held by reading the source: which way imports flow, and what no file may mention."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("safe_trainer", "utils", "recipes", "conf")  # what is installed
SKIPPED = ("build", "dist", "runs", "data", "__pycache__")
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".cfg", ".txt", ".json", ".html", ".css", ".js", ".pyi", ""}
HEAVY = {"sklearn", "torchvision", "matplotlib", "plotly", "tensorboard", "wandb", "mlflow", "jinja2"}
# Spelled in pieces, so that this file does not mention them.
PRIVATE = re.compile(r"(?<![\w.])/" + "work" + r"\b|/tmp/" + "venv|\\.\\./" + "shared|shared" + "/[A-Z]+\\.md")

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs a checkout")


HYDRA_FILES = ("safe_trainer/__main__.py", "safe_trainer/command_line.py", "safe_trainer/build.py")


def files(*folders: str, suffixes: set[str]) -> list[Path]:
    """Files with these suffixes below the folders of the checkout; hidden folders and built things are left out."""
    found = []
    for path in sorted(file for folder in folders for file in (ROOT / folder).rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part not in (".ci", ".pre-commit-config.yaml") for part in parts)
        built = parts[0] in SKIPPED or "__pycache__" in parts or any(part.endswith(".egg-info") for part in parts)
        if path.is_file() and path.suffix in suffixes and not hidden and not built:
            found.append(path)
    return found


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Full name of every module that `tree` imports, wherever it does; `package` resolves relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def at_import_time(tree: ast.Module) -> ast.Module:
    """What runs when the module is imported: no function bodies, nothing under TYPE_CHECKING."""

    class Cut(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)

    return Cut().visit(tree)


def within(module: str, *names: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def may_import(path: str, module: str) -> bool:
    """Whether the arrows let the file at `path` below the root import `module`, in whatever place."""
    folder, top = path.split("/")[0], module.split(".")[0]
    if top in ("utils", "recipes", "conf", "tests"):
        return False  # once installed, these names belong to somebody else
    if folder == "utils":
        known = ("torch", "numpy", "rich", *sys.stdlib_module_names)
        return top in known or within(module, "safe_trainer.utils")
    if folder == "recipes":
        ours = within(module, "safe_trainer.utils", "safe_trainer.recipes")
        return ours or top not in ("safe_trainer", "hydra", "omegaconf")
    return top != "hydra" or path in HYDRA_FILES


def wrong_imports(source: str, path: str) -> list[str]:
    """Imports in `source`, a file at `path` below the root, that go against the arrows or cost too much too early."""
    parts = Path(path).parent.parts
    package = ".".join(parts if parts[0] == "safe_trainer" else ("safe_trainer", *parts))
    everywhere = set(imports(ast.parse(source), package))
    early = set(imports(at_import_time(ast.parse(source)), package))
    heavy = {module for module in early if module.split(".")[0] in HEAVY}
    return sorted(heavy | {module for module in everywhere if not may_import(path, module)})


@pytest.mark.parametrize("path", files(*FOLDERS, suffixes={".py"}), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_flow_one_way(path: Path) -> None:
    assert wrong_imports(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("utils/rng.py", "from safe_trainer.config import Config"),
        ("utils/rng.py", "import safe_trainer"),
        ("utils/rng.py", "def f():\n    from omegaconf import OmegaConf"),
        ("utils/rng.py", "import sklearn.datasets"),
        ("utils/rng.py", "from ..config import Config"),
        ("utils/rng.py", "from utils import anomaly"),
        ("recipes/digits.py", "from safe_trainer import SafeTrainer"),
        ("recipes/digits.py", "from safe_trainer.trainer import SafeTrainer"),
        ("recipes/digits.py", "import hydra.utils"),
        ("recipes/digits.py", "import torchvision"),
        ("safe_trainer/trainer.py", "from hydra import compose"),
        ("safe_trainer/trainer.py", "try:\n    import matplotlib.pyplot\nexcept ImportError:\n    pass"),
        ("safe_trainer/loggers/tensorboard.py", "import utils.anomaly"),
    ],
)
def test_a_wrong_import_is_noticed(path: str, source: str) -> None:
    assert len(wrong_imports(source, path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("utils/rng.py", "import math, numpy, torch\nfrom safe_trainer.utils.anomaly import AnomalyDetector"),
        ("utils/rng.py", "from . import anomaly\nfrom .anomaly import AnomalyDetector"),
        ("recipes/digits.py", "from safe_trainer.utils import rng\ndef f():\n    import sklearn.datasets"),
        ("safe_trainer/__main__.py", "import hydra\nfrom safe_trainer.trainer import SafeTrainer"),
        ("safe_trainer/build.py", "from hydra.utils import get_class"),
        ("safe_trainer/trainer.py", "from .config import Config\nimport omegaconf"),
        ("safe_trainer/data.py", "if TYPE_CHECKING:\n    import torchvision\nf = lambda: __import__('torchvision')"),
    ],
)
def test_a_right_import_passes(path: str, source: str) -> None:
    assert wrong_imports(source, path) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_with_modules_is_a_package(folder: str) -> None:
    for path in files(folder, suffixes={".py"}):
        assert (path.parent / "__init__.py").exists(), (
            f"{path.parent.name}/ has modules but no __init__.py: not installed"
        )


def test_no_file_mentions_a_private_place() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files(".", suffixes=TEXT)
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="ignore").splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("line", ["see ../" + "shared/x", "in shared" + "/X.md", "cd /" + "work/x", "/tmp/" + "venv/x"])
def test_a_private_place_is_noticed(line: str) -> None:
    assert PRIVATE.search(line)


@pytest.mark.parametrize("line", ["how workers share the work", "num/workers", "./work/a", "two ranks share a/folder"])
def test_ordinary_words_pass(line: str) -> None:
    assert not PRIVATE.search(line)


def test_each_module_says_what_it_is_for() -> None:
    for path in files(*FOLDERS, suffixes={".py"}):
        source = path.read_text(encoding="utf-8")
        assert not source.strip() or ast.get_docstring(ast.parse(source)), f"{path.relative_to(ROOT)} has no docstring"
