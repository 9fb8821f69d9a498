"""The command line: exit codes, all mistakes at once, runs, resume, evaluation and replay of a run."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from safe_trainer import __main__ as cli
from safe_trainer import modes
from safe_trainer.config import ConfigError

ROOT = Path(__file__).parents[1]
QUICK = ("limit_train_batches=2", "limit_val_batches=1", "max_epochs=1", "progress=false")


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Call the command line in this process, in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["safe_trainer", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err

    return call


def test_three_mistakes_are_told_at_once_without_a_traceback(run, tmp_path):
    code, _, err = run("optimizer.lrr=0.1", "+foo=1", "max_epochs=abc")
    assert code == 2
    assert "3 mistakes" in err
    assert "optimizer.lrr is not an argument of torch.optim.SGD (got 0.1); did you mean optimizer.lr?" in err
    assert "foo is not an option (got 1)" in err
    assert "max_epochs must be a whole number, or null (got 'abc')" in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["optimizer=adamww"], "optimizer must be one of adam, adamw, sgd (got 'adamww'); did you mean"),
        (["+recipe=digit"], "did you mean digits?"),
        (["optimizer.lr=-1"], "Invalid learning rate: -1"),
        (["optimizer.momentum=abc"], "optimizer.momentum must be a number (got 'abc')"),
        (["model._target_=torch.nn.Linear2"], "torch.nn has no 'Linear2'"),
        (["model._target_=nowhere.Model"], "there is no module 'nowhere'"),
        (["model=null", "metrics=none"], "model must be given"),
        (["a==b="], "cannot be read as key=value"),
        (["seed=${nope}"], "'nope' not found"),
        (["guard.nonfinte=skip"], "did you mean guard.nonfinite?"),
        (["device=cuda:77"], "device must be auto or one that is there"),
        (["preflight.checks=[inits]"], "preflight.checks must be a list of summary, data, init"),
        (["optimizer.lr=best"], "optimizer.lr must be a number"),
        (["mode=replay"], "needs path=RUN_FOLDER"),
        (["mode=evaluate", "path=nowhere"], "path must be the folder of a run"),
        (["resume=last"], "resume=last needs run_dir"),
        (["resume=nowhere.pt"], "there is no checkpoint"),
        (["--config-dir", "nowhere"], "--config-dir must be a folder"),
        (["loader.drop_last=true", "loader.batch_size=9999"], "at most the"),
        (["scheduler=one_cycle", "scheduler.total_steps=1.5"], "scheduler.total_steps must be a whole number"),
    ],
)
def test_a_mistake_of_the_user_ends_in_exit_code_2_and_a_sentence(run, arguments, words):
    code, _, err = run(*arguments, "progress=false")
    assert code == 2, err
    assert words in err
    assert "Traceback" not in err


def test_a_run_leaves_its_configuration_environment_log_and_checkpoint(run, tmp_path):
    code, _, err = run(*QUICK, "run_dir=here", "anomaly_detection=true", "sample_rate=100")
    assert code == 0, err
    folder = tmp_path / "here"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["anomaly_detection"], config["sample_rate"]) == (True, 100)
    assert config["optimizer"]["_target_"] == "torch.optim.SGD"
    assert "torch" in json.loads((folder / "environment.json").read_text())["packages"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 2
    assert "val/accuracy" in rows[-1]
    assert list(folder.glob("checkpoints/step-*.pt"))
    assert list(folder.glob("events.out.tfevents*"))


def test_runs_without_a_folder_get_one_each_under_runs(run, tmp_path):
    for _ in range(2):
        assert run(*QUICK, "name=mine")[0] == 0
    assert len(list((tmp_path / "runs" / "mine").iterdir())) == 2


def test_a_run_goes_on_where_it_stood(run, tmp_path):
    options = ("limit_val_batches=1", "progress=false", "run_dir=here", "limit_train_batches=2")
    assert run(*options, "scheduler=none", "max_steps=2")[0] == 0
    code, _, err = run(*options, "scheduler=cosine", "max_steps=4", "resume=last")
    assert code == 2
    assert "it has no scheduler, the program has one" in err
    code, _, err = run(*options, "scheduler=none", "max_steps=4", "resume=last")
    assert code == 0, err
    steps = [json.loads(line)["step"] for line in (tmp_path / "here" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [2, 4]


def test_a_schedule_of_another_length_is_not_taken_over_in_silence(run):
    assert run(*QUICK, "run_dir=here")[0] == 0
    code, _, err = run(*QUICK, "run_dir=here", "resume=last", "max_epochs=3")
    assert code == 2
    assert "its schedule is 2 steps long, the program's 6" in err


def test_a_checkpoint_can_be_judged_afterwards(run, tmp_path):
    assert run(*QUICK, "run_dir=here")[0] == 0
    row = json.loads((tmp_path / "here" / "metrics.jsonl").read_text().splitlines()[-1])
    code, out, err = run("mode=evaluate", "path=here")
    assert code == 0, err
    assert f"{row['val/loss']:.4g}" in out
    assert "test/accuracy" in out


OWN_MODEL = ("~model.num_classes", "~model.width", "~model.channels", "~model.dropout", "metrics=none")
BROKEN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, pictures):
        return torch.log(torch.relu(self.layer(pictures.flatten(1))))  # the culprit
"""


def test_a_blown_fuse_ends_in_exit_code_4_and_can_be_replayed(run, tmp_path, monkeypatch):
    (tmp_path / "my_broken_model.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, err = run(*OWN_MODEL, "model._target_=my_broken_model.Model", "run_dir=here", "max_epochs=1")
    assert code == 4, err
    assert "loss.log_of_zero" in out
    assert "my_broken_model.py:11" in out
    code, out, err = run("mode=replay", "path=here")
    assert code == 0, err
    assert "step-00000001.pt: error: loss.log_of_zero in layer" in out or "my_broken_model.py:11" in out


def test_an_exception_of_the_users_keeps_its_traceback(run, tmp_path, monkeypatch):
    (tmp_path / "my_raising_model.py").write_text(BROKEN.replace("return torch.log", "raise KeyError('mine')  #"))
    monkeypatch.syspath_prepend(str(tmp_path))
    code, _, err = run(*OWN_MODEL, "model._target_=my_raising_model.Model", *QUICK)
    assert code == 1
    assert "KeyError: 'mine'" in err
    assert "my_raising_model.py" in err
    assert "raised in training step 1, in module Model" in err


def test_recipes_are_listed_with_the_line_that_runs_them(run, tmp_path):
    code, out, _ = run("mode=recipes")
    assert code == 0
    assert "python -m safe_trainer +recipe=resnet18_cifar" in out
    assert not list(tmp_path.iterdir())


def test_the_list_of_recipes_fits_a_terminal_and_has_those_of_a_folder(run, tmp_path):
    (tmp_path / "my conf" / "recipe").mkdir(parents=True)
    head = "# @package _global_\n# python -m safe_trainer --config-dir elsewhere +recipe="
    long = "a description that goes on for much longer than half a line of the list can hold, and then some"
    (tmp_path / "my conf" / "recipe" / "mine.yaml").write_text(f"{head}mine data.root=DIR    {long}\nname: mine\n")
    (tmp_path / "my conf" / "recipe" / "bare.yaml").write_text("name: bare\n")
    code, out, _ = run("--config-dir", "my conf", "mode=recipes")
    assert code == 0
    lines = out.splitlines()
    assert "python -m safe_trainer --config-dir 'my conf' +recipe=mine data.root=DIR" in lines
    assert "python -m safe_trainer --config-dir 'my conf' +recipe=bare" in lines
    assert long in " ".join(out.split())
    assert max(map(len, lines)) <= 100
    commands = [line for line in lines if line.startswith("python")]
    assert len(commands) == 2 + len(cli.options("recipe", cli.conf_folders(None)))
    beside = {line.index("  ") for line in commands if "  " in line}
    below = {len(line) - len(line.lstrip()) for line in lines if line.startswith(" ")}
    assert len(beside) > 1  # commands of several lengths
    assert len({len(line) - len(line.split("  ")[-1].lstrip()) for line in commands if "  " in line} | below) == 1


def test_a_file_that_hides_behind_one_of_ours_is_refused(run, tmp_path):
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    mine = tmp_path / "conf" / "recipe" / "digits.yaml"
    mine.write_text("# @package _global_\nname: mine\n")
    code, _, err = run("--config-dir", "conf", "+recipe=digits")
    assert code == 2
    assert "recipe/digits.yaml must have a name of its own" in err
    mine.write_bytes((ROOT / "conf" / "recipe" / "digits.yaml").read_bytes())
    assert run("--config-dir", "conf", "mode=recipes")[0] == 0


def test_an_error_message_is_explained(run, tmp_path):
    (tmp_path / "error.txt").write_text("RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.")
    code, out, _ = run("mode=explain", "error=error.txt")
    assert code == 0
    assert "MulBackward0" in out
    assert run("mode=explain", "error=nowhere.txt")[0] == 2
    assert run("mode=explain")[0] == 2


def test_a_sweep_gives_each_run_a_folder(run, tmp_path):
    code, _, err = run("--multirun", "optimizer.lr=0.1,0.2", *QUICK)
    assert code == 0, err
    (sweep,) = (tmp_path / "runs" / "digits").iterdir()
    rates = [yaml.safe_load((sweep / str(job) / "config.yaml").read_text())["optimizer"]["lr"] for job in (0, 1)]
    assert rates == [0.1, 0.2]


def test_overrides_are_rewritten_so_that_the_schema_judges_them():
    folders = cli.conf_folders(None)
    assert cli.readable_overrides(["optimizer.lrr=0.1", "+foo=1", "optimizer=adamw", "recipe=digits"], folders) == [
        "++optimizer.lrr=0.1",
        "++foo=1",
        "optimizer=adamw",
        "+recipe=digits",
    ]
    with pytest.raises(ConfigError):
        cli.readable_overrides(["optimizer=nothing"], folders)


def test_interrupting_before_the_run_ends_with_130_too(run, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("safe_trainer.__main__.composed", interrupted)
    code, _, err = run("progress=false")
    assert code == 130
    assert "Traceback" not in err


@pytest.mark.parametrize("preflight", ["true", "false"])
def test_interrupting_ends_with_130_and_a_whole_folder(preflight, tmp_path):
    """A real process and a real signal: Ctrl-C in the middle of the checks or of training."""
    command = [sys.executable, "-c", INTERRUPTED.replace("CHECKED", preflight)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert "broken off" in done.stdout
    assert preflight == "true" or (tmp_path / "here" / "config.yaml").exists()


INTERRUPTED = """
import os, signal, sys
from torch.optim import SGD
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
calls = []
def step(self, *args, _step=SGD.step, **kwargs):
    calls.append(1)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGINT)
    return _step(self, *args, **kwargs)
SGD.step = step
sys.argv = ["safe_trainer", "run_dir=here", "scheduler=none", "preflight.enabled=CHECKED"]
from safe_trainer.__main__ import main
main()
"""


# --- sweeps, folders of one's own, and what is refused ---------------------------------------------------------------


def test_a_sweep_over_choices_of_a_group_trains_each(run, tmp_path):
    code, _, err = run("--multirun", *QUICK, "optimizer=sgd,adamw", "hydra.sweep.dir=sweep")
    assert code == 0, err
    targets = [
        path.read_text() for path in sorted((tmp_path / "sweep").rglob("config.yaml")) if ".hydra" not in str(path)
    ]
    assert len(targets) == 2
    assert "torch.optim.SGD" in targets[0]
    assert "torch.optim.AdamW" in targets[1]


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (["--multirun", "optimizer=sgd,adamww"], ["got 'adamww'); did you mean adamw"]),
        (["--multirun", "max_epochs=abc", "foo=1", "optimizer.lr=0.1,0.2"], ["max_epochs must", "foo is not"]),
        (["--multirun", "name=${name}"], ["name cannot be resolved"]),
        (["--multirun", "run_dir=x", "optimizer.lr=0.1,0.2"], ["run_dir must not be given with --multirun"]),
        (["--multirun", "resume=last", "optimizer.lr=0.1,0.2"], ["resume must not be given with --multirun"]),
        (["--multirun", "mode=recipes"], ["--multirun needs mode=train"]),
        (["optimizer=sgd,adamw"], ["names several values: add --multirun"]),
        (["optimizer=5"], ["optimizer must be one of adam, adamw, sgd (got 5)"]),
        (["optimizer=[a,b]"], ["optimizer must be one of adam, adamw, sgd"]),
        (["+recipe=[digits,tabular]"], ["--multirun +recipe=a,b"]),
        (["model=null", "max_epochs=abc", "foo=1"], ["model must", "max_epochs must", "foo is", "resolved"]),
        (["~optimizer"], ["optimizer must be given", "scheduler.max_lr cannot be resolved"]),
        (["~max_epoch"], ["~max_epoch takes out what is not there", "did you mean max_epochs"]),
        (["optimizer.lr=nan"], ["optimizer.lr must be a finite number (got nan)"]),
        (["optimizer.momentum=inf"], ["optimizer.momentum must be a finite number (got inf)"]),
        (["optimizer.lr=1e400"], ["optimizer.lr must be a finite number (got inf)"]),
        (["model._args_=5"], ["model._args_ must be a list"]),
        (["loader.batch_size=100000000000000000000"], ["loader.batch_size must be at least 1, and at most"]),
        (["model={_target_: builtins.dict}"], ["model._target_ must give a torch.nn.Module (got dict)"]),
        (["device=meta"], ["device must be auto or one that is there"]),
        (["run_dir='~nobody_at_all/x'"], ["run_dir must be a folder that can be written"]),
        (["preflight.checks=[1,2]"], ["preflight.checks must be a list of summary, data"]),
        (["loader=null", "guard=null"], ["loader must be a section", "guard must be a section"]),
        (["mode=evaluate", "path=nope"], ["got nope, which does not exist"]),
        (["--config-dir", "nope", "+recipe=mine"], ["--config-dir must be a folder (got 'nope'"]),
    ],
)  # fmt: skip
def test_a_mistake_on_the_command_line_is_told_in_sentences(words, sentences, run):
    code, _, err = run(*words)
    assert code == 2, err
    assert "Traceback" not in err
    for sentence in sentences:
        assert sentence in err


@pytest.mark.parametrize("name", ["plain", "d é x", "it's #1", "a,b=c", "[x] {y}", "back\\slash"])
def test_a_folder_of_recipes_may_have_any_name(name, run, tmp_path):
    (tmp_path / name / "recipe").mkdir(parents=True)
    (tmp_path / name / "recipe" / "mine.yaml").write_text("# @package _global_\nmax_epochs: 1\nname: mine\n")
    code, _, err = run("--config-dir", name, "+recipe=mine", *QUICK, "run_dir=here")
    assert code == 0, err
    assert "name: mine" in (tmp_path / "here" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "# @package _global_\na: [1\nb: 2\n",
            "must be YAML: expected ',' or ']', but got ':' (got line 3, column 2 of",
        ),
        ("max_epochs: 1\n", "must begin with the line `# @package _global_`"),
        ("# @package _global_\ndefaults:\n  - override /optimizer: sgdd\n", "'optimizer/sgdd' Available options"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_told(text, sentence, run, tmp_path):
    (tmp_path / "own" / "recipe").mkdir(parents=True)
    (tmp_path / "own" / "recipe" / "mine.yaml").write_text(text)
    code, _, err = run("--config-dir", "own", "+recipe=mine")
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err


def test_a_module_that_ends_the_process_when_imported_is_told(run, tmp_path):
    (tmp_path / "a_script_that_ends.py").write_text("import sys\nsys.exit(0)\n")
    code, _, err = run("model._target_=a_script_that_ends.Model")
    assert code == 2
    assert "importing a_script_that_ends raised SystemExit" in err


def test_the_whole_configuration_can_be_printed(run):
    code, out, _ = run("--cfg", "job", "max_epochs=3")
    assert code == 0
    shown = yaml.safe_load(out)
    assert shown["max_epochs"] == 3
    assert shown["guard"]["nonfinite"] == "stop"  # an option that no YAML names


def test_a_terminal_without_the_signs_still_gets_the_verdict(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "safe_trainer", "limit_train_batches=2", "limit_val_batches=1", "max_epochs=1",
         "name='é'"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0
    assert "nothing was found wrong" in done.stdout
    assert "folder" in done.stdout


def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys):
    with modes.log_file(tmp_path / "gone" / "train.log"):
        logging.getLogger("safe_trainer").warning("a word")
    assert not (tmp_path / "gone").exists()
