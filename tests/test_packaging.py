"""What a wheel contains and how an installed copy behaves. Builds in temporary folders; the checkout stays clean."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from installation import ROOT, run, run_python, site_packages

MAPPING = {
    "safe_trainer": "",
    "utils": "utils",
    "conf": "conf",
    "recipes": "recipes",
}  # folder -> name below the package
NOT_OURS = ("tests", "docs", "benchmarks", "build", "dist", "runs", "data")

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs a checkout")


def setuptools_table() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages_in(root: Path) -> set[str]:
    """Import names, once installed, of all folders below `root` that have an ``__init__.py``."""
    found = set()
    for init in root.rglob("__init__.py"):
        parts = init.parent.relative_to(root).parts
        if parts and parts[0] not in NOT_OURS and not any(part.startswith(".") for part in parts):
            found.add(".".join(parts if parts[0] == "safe_trainer" else ("safe_trainer", *parts)))
    return found


# In the checkout: cheap, part of `make test`.


def test_packages_in_pyproject_are_the_folders_with_an_init() -> None:
    listed = setuptools_table()["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == packages_in(ROOT)


def test_a_forgotten_package_is_noticed(tmp_path: Path) -> None:
    for folder in ("safe_trainer/new", "utils", "recipes/vision", "tests/utils", ".venv/lib/other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
    assert packages_in(tmp_path) == {"safe_trainer.new", "safe_trainer.utils", "safe_trainer.recipes.vision"}


def test_top_level_folders_are_mapped_below_the_one_import_name() -> None:
    expected = {f"safe_trainer.{name}" if name else "safe_trainer": folder for folder, name in MAPPING.items()}
    assert setuptools_table()["package-dir"] == expected


def test_every_yaml_matches_the_package_data() -> None:
    patterns = setuptools_table()["package-data"]["safe_trainer.conf"]
    matched = {path for pattern in patterns for path in (ROOT / "conf").glob(pattern)}
    files = {path for path in (ROOT / "conf").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files
    assert files <= matched


UNDER_BOTH_NAMES = """
import importlib, sys
from utils.anomaly import AnomalyDetector
import safe_trainer.utils.anomaly
assert AnomalyDetector is safe_trainer.utils.anomaly.AnomalyDetector
for name in sys.argv[1:]:
    if importlib.import_module("utils." + name) is not importlib.import_module("safe_trainer.utils." + name):
        print(name)
"""


def test_top_level_utils_at_the_root_are_the_same_modules_not_copies() -> None:
    names = sorted(path.stem for path in (ROOT / "utils").glob("*.py") if path.stem != "__init__")
    assert "anomaly" in names
    assert run_python(UNDER_BOTH_NAMES, *names, cwd=ROOT) == []


SPAWNED = """
import multiprocessing, torch
from torch.utils.data import DataLoader

class Names(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        import safe_trainer.utils.anomaly
        return safe_trainer.utils.anomaly.__file__

if __name__ == "__main__":
    print(*next(iter(DataLoader(Names(), batch_size=2, num_workers=1, multiprocessing_context="spawn"))), sep="\\n")
"""


def test_a_spawned_worker_finds_the_checkout_through_pythonpath(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    done = run([sys.executable, str(script)], cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(ROOT / "utils" / "anomaly.py")] * 2


# Built and installed: slow.


@pytest.fixture
def neighbour(tmp_path: Path) -> Path:
    """A user's folder with a `utils`, a `conf` and a `recipes` of their own."""
    for name in ("utils", "conf", "recipes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"OWNER = 'user of {name}'\n")
    return tmp_path


WHERE = """
import safe_trainer, safe_trainer.utils.anomaly, safe_trainer.recipes, safe_trainer.conf
for module in (safe_trainer, safe_trainer.utils.anomaly, safe_trainer.recipes, safe_trainer.conf):
    print(module.__file__)
"""


@pytest.mark.slow
def test_the_sdist_gives_the_same_wheel(built: dict[str, Path]) -> None:
    contents = []
    for name in ("wheel", "direct"):
        with zipfile.ZipFile(built[name]) as archive:
            contents.append({entry: archive.read(entry) for entry in archive.namelist() if "/RECORD" not in entry})
    assert contents[0] == contents[1]


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_every_yaml_and_nothing_else(built: dict[str, Path]) -> None:
    expected = {"safe_trainer/py.typed"}
    for folder, name in MAPPING.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix == ".py" or (path.suffix == ".yaml" and folder == "conf"):
                expected.add(Path("safe_trainer", name, path.relative_to(ROOT / folder)).as_posix())
    with zipfile.ZipFile(built["wheel"]) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected


@pytest.mark.slow
def test_site_packages_gets_one_top_level_name(installed: Path) -> None:
    names = {path.name for path in site_packages(installed).iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"safe_trainer", "borrowed.pth"}
    for name in ("utils", "conf", "recipes", "tests"):
        code = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
        assert run_python(code, cwd=installed.parent, python=installed) == ["None"]


@pytest.mark.slow
def test_an_empty_folder_gets_the_wheel(installed: Path, tmp_path: Path) -> None:
    files = run_python(WHERE, cwd=tmp_path, python=installed)
    assert all(Path(file).is_relative_to(site_packages(installed)) for file in files), files


@pytest.mark.slow
def test_a_users_own_utils_stays_theirs(installed: Path, neighbour: Path) -> None:
    code = WHERE + "import utils, conf, recipes\nprint(utils.OWNER, conf.OWNER, recipes.OWNER, sep=', ')"
    *files, owners = run_python(code, cwd=neighbour, python=installed)
    assert all(Path(file).is_relative_to(site_packages(installed)) for file in files), files
    assert owners == "user of utils, user of conf, user of recipes"


@pytest.mark.slow
def test_the_root_of_a_checkout_is_not_mixed_with_the_wheel(installed: Path) -> None:
    assert run_python(WHERE, cwd=ROOT, python=installed) == [
        str(ROOT / file)
        for file in ("safe_trainer/__init__.py", "utils/anomaly.py", "recipes/__init__.py", "conf/__init__.py")
    ]
    assert run_python(UNDER_BOTH_NAMES, "anomaly", cwd=ROOT, python=installed) == []


TWO_STEPS = ["limit_train_batches=2", "limit_val_batches=1", "max_epochs=1"]


def assert_trained(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(folder.glob("runs/*/*/metrics.jsonl"))) == 1


@pytest.mark.slow
def test_the_module_trains_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    assert_trained(run([str(installed), "-m", "safe_trainer", *TWO_STEPS], cwd=tmp_path), tmp_path)


@pytest.mark.slow
def test_the_module_trains_beside_a_users_own_utils(installed: Path, neighbour: Path) -> None:
    assert_trained(run([str(installed), "-m", "safe_trainer", *TWO_STEPS], cwd=neighbour), neighbour)


@pytest.mark.slow
def test_the_console_script_trains(installed: Path, neighbour: Path) -> None:
    assert_trained(run([str(installed.parent / "safe-trainer"), *TWO_STEPS], cwd=neighbour), neighbour)


@pytest.mark.slow
@pytest.mark.parametrize("as_module", [True, False])
def test_the_root_of_a_checkout_trains(installed: Path, tmp_path: Path, as_module: bool) -> None:
    command = [str(installed), "-m", "safe_trainer"] if as_module else [str(installed.parent / "safe-trainer")]
    done = run([*command, *TWO_STEPS, f"run_dir={tmp_path / 'here'}"], cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "here" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_tests_copied_away_from_the_checkout_pass_against_the_wheel(installed: Path, tmp_path: Path) -> None:
    for name in ("test_public_names.py", "utils/test_anomaly.py", "utils/test_rng.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests" / name, tmp_path / name)
    options = ["-p", "no:cacheprovider", "--import-mode=importlib", "-W", "error", "-m", "not slow", "-q"]
    done = run([str(installed), "-m", "pytest", *options, str(tmp_path)], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
