import io

import pytest
import torch
from rich.console import Console
from torch import nn

from safe_trainer.model_summary import TABLE_ROWS, literal, model_summary


def shown(model, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(model_summary(model))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    return [words for words in lines if words and not words[0].startswith("─")]


def total(model):
    return shown(model)[-1]


def test_each_layer_has_a_row_and_the_rows_add_up():
    model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 5))
    rows = shown(model)
    assert rows[1:5] == [["0", "Linear", "220"], ["1", "BatchNorm1d", "40"], ["2", "ReLU"], ["3", "Linear", "105"]]
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    assert total(model) == ["total", "365", "all", "trainable,", f"{size / 2**20:.1f}", "MiB"]


def test_nested_layers_are_indented_as_deep_as_fits():
    block = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3)))
    console = Console(file=io.StringIO(), width=100)
    console.print(model_summary(nn.Sequential(block)))
    names = [line[1:8].rstrip() for line in console.file.getvalue().splitlines()[3:7]]
    assert names == ["0", "  0", "  1", "    0"]


def test_frozen_layers_are_marked():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    rows = shown(model)
    assert rows[1] == ["0", "Linear", "6", "frozen"]
    assert rows[2] == ["1", "Linear", "9", "partly", "frozen"]
    assert rows[-1][2:4] == ["6", "trainable,"]


def test_tied_weights_are_counted_once():
    model = nn.ModuleDict({"embedding": nn.Embedding(100, 8), "head": nn.Linear(8, 100, bias=False)})
    assert total(model)[1] == "1,600"
    model["head"].weight = model["embedding"].weight
    assert total(model)[1] == "800"
    assert shown(model)[2] == ["head", "Linear", "shared"]


def test_a_module_that_stands_in_two_places_is_counted_once():
    one = nn.Linear(3, 3)
    model = nn.Sequential(one, nn.ReLU(), one)
    assert total(model)[1] == "12"
    assert shown(model)[3] == ["2", "Linear", "shared"]


def test_parameters_right_in_a_module_are_counted():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("token", nn.Parameter(torch.zeros(7)))
    model.register_parameter("absent", None)
    assert total(model)[1] == "13"


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_parameters_without_a_shape_yet_are_told():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    rows = shown(model)
    assert " ".join(rows[1]) == "0 LazyLinear shape not known yet"
    assert " ".join(rows[-1]).startswith("total at least 10")
    model(torch.zeros(1, 3))
    assert total(model)[1] == "26"


def test_blocks_alike_share_a_row():
    model = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(12)])
    rows = shown(model)
    assert rows[1] == ["0", "..", "11", "12", "x", "Sequential", "240"]
    assert len(rows) == 3


@pytest.mark.parametrize("alike", [True, False])
def test_a_thousand_layers_fit_a_screen(alike):
    model = nn.Sequential(*[nn.Linear(2, 2) if alike or i % 2 else nn.ReLU() for i in range(1000)])
    rows = shown(model)
    assert len(rows) <= TABLE_ROWS + 2
    assert total(model)[1] == ("6,000" if alike else "3,000")
    numbers = [row[-1].replace(",", "") for row in rows[1:-1] if len(row) > 2]
    assert sum(int(number) for number in numbers if number.isdigit()) == (6000 if alike else 3000)


def test_a_model_of_one_layer_and_one_of_none():
    assert shown(nn.Linear(2, 2))[1] == ["(model)", "Linear", "6"]
    assert total(nn.Sequential())[1] == "0"


def test_the_summary_leaves_the_model_and_the_generators_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    model_summary(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training


def test_names_are_taken_literally():
    model = nn.ModuleDict({"[red]x[/nothing]": nn.ReLU(), "a\x1b[2Jb": nn.Linear(1, 1)})
    rows = shown(model)
    assert rows[1][0] == "[red]x[/nothing]"
    assert rows[2][0] == "a\N{REPLACEMENT CHARACTER}[2Jb"
    assert literal("ü\n") == "ü\n"
