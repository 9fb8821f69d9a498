"""The configuration page is current, complete, and cannot be made from a schema that leaves an option undescribed."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from safe_trainer import config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs" / "make_configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # a dataclass looks its module up while it is made
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


def test_the_page_is_current(maker: ModuleType) -> None:
    made = maker.page(maker.SOURCE.read_text(encoding="utf-8"))
    assert maker.PAGE.read_text(encoding="utf-8") == made, "run: make docs"


def test_the_page_has_every_option(maker: ModuleType) -> None:
    page = maker.PAGE.read_text(encoding="utf-8")
    for name in config.option_names():
        assert f"| `{name}` |" in page or f"\n### {name}\n" in page, name


@pytest.mark.parametrize("name", ["loader.batch_size", "sample_rate", "guard.rollback_lr_factor"])
def test_a_range_reaches_the_page(maker: ModuleType, name: str) -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.parse({name: 1000.5 if "factor" in name else -1})
    must = caught.value.problems[0].split("must be ")[1].split(" (got")[0]
    row = next(line for line in maker.PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{name}`"))
    assert f"| {must} |" in row


SCHEMA = '''
class Color(Enum):
    """Which."""
    red = "red"
    blue = "blue"

@dataclass
class PartConfig:
    """A part."""
    width: int | None = None
    """How wide,
    in pixels."""
    def __post_init__(self):
        _hold(self, ("width", "at least 1, or null", lambda value: value >= 1))

@dataclass
class Config:
    """All."""
    color: Color = Color.red
    """Which | one."""
    names: list[str] | None = None
    """Some."""
    part: PartConfig = field(default_factory=PartConfig)
'''


def test_rows_say_type_default_and_range(maker: ModuleType) -> None:
    page = maker.page(SCHEMA)
    assert "| `color` | `red`, `blue` | `red` |  | Which \\| one. |" in page
    assert "| `names` | list of text, or null | `null` |  | Some. |" in page
    assert "| `part.width` | whole number, or null | `null` | at least 1, or null | How wide, in pixels. |" in page


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('    """Some."""\n', "", "Config.names has no docstring below it"),
        ('("width", ', '("depth", ', "PartConfig has a rule for depth, which is no option"),
    ],
)
def test_a_gap_in_the_schema_is_an_error(maker: ModuleType, old: str, new: str, message: str) -> None:
    assert old in SCHEMA
    with pytest.raises(ValueError, match=message):
        maker.page(SCHEMA.replace(old, new))


def test_check_says_whether_the_page_is_out_of_date(
    maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert maker.main(["--check"]) == 0
    monkeypatch.setattr(maker, "PAGE", tmp_path / "configuration.md")
    assert maker.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().out
