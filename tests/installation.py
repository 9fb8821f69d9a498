"""Commands in fresh interpreters, and a copy of the project that is built and installed for the tests that want one.

The installed copy lives in a virtual environment of its own that borrows torch and the rest from the interpreter that
runs the tests, by a .pth file: plain path lines there do not carry over an editable install of this project.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str, *arguments: str, cwd: Path, python: Path | str = sys.executable) -> list[str]:
    """Lines that `code` prints in a fresh interpreter."""
    done = run([str(python), "-c", code, *arguments], cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run(command: list[str], *, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The finished command; of what steers Python's imports it knows only what is given here."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH", "DEBUG_ANOMALY")}
    env = {**inherited, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Paths of the wheel made from the sdist, of the wheel made from the tree, and of the sdist."""
    folder = tmp_path_factory.mktemp("build")
    skipped = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "runs")
    source = shutil.copytree(ROOT, folder / "source", ignore=skipped)
    for target, options in (("out", []), ("direct", ["--wheel"])):
        command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(folder / target), "."]
        done = run(command, cwd=source)
        assert done.returncode == 0, done.stdout + done.stderr
        shutil.rmtree(source / "build", ignore_errors=True)
    (wheel,), (direct,) = (folder / "out").glob("*.whl"), (folder / "direct").glob("*.whl")
    (sdist,) = (folder / "out").glob("*.tar.gz")
    return {"wheel": wheel, "direct": direct, "sdist": sdist}


@pytest.fixture(scope="session")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a clean environment that has the wheel, and borrows what the wheel depends on."""
    folder = tmp_path_factory.mktemp("environment")
    assert run([sys.executable, "-m", "venv", "--without-pip", str(folder)], cwd=folder).returncode == 0
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    done = run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--no-deps",
            "--no-index",
            str(built["wheel"]),
        ],
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site_packages(python) / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return python


def site_packages(python: Path) -> Path:
    base = str(python.parent.parent)
    return Path(sysconfig.get_path("purelib", "venv", {"base": base, "platbase": base}))
