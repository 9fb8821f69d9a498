"""The public names, pinned: to add or drop one is a decision, written down here and in CHANGELOG.md."""

import subprocess
import sys

import safe_trainer

PUBLIC = {
    "CheckResult",
    "Config",
    "ConfigError",
    "Finding",
    "Report",
    "SafeTrainer",
    "SafetyError",
    "Severity",
    "Status",
    "explain",
    "revive_dead_units",
    "watch",
}
HEAVY = ("hydra", "sklearn", "torchvision", "matplotlib", "plotly", "tensorboard", "torchmetrics", "jinja2")


def test_public_names_are_these() -> None:
    assert set(safe_trainer.__all__) - {"__version__"} == PUBLIC
    assert len(safe_trainer.__all__) == len(set(safe_trainer.__all__))


def test_each_public_name_is_there_and_says_what_it_is() -> None:
    for name in PUBLIC:
        public = getattr(safe_trainer, name)
        assert public.__module__.startswith("safe_trainer"), name
        assert public.__doc__, name


def test_version_is_a_plain_release_number() -> None:
    assert all(part.isdigit() for part in safe_trainer.__version__.split(".")[:2])


def test_the_library_needs_no_heavy_import() -> None:
    code = f"import sys, safe_trainer; safe_trainer.SafeTrainer; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
