"""benchmarks/train_moe.py: the same model on any number of ranks, and what it says about runs."""

import dataclasses
import json
import math
import re
import sys

import click
import numpy as np
import pytest
import ranks
import torch
from rich.progress import Progress

sys.path.insert(0, str(ranks.ROOT / "benchmarks"))

import moe_report
import moe_training
import train_moe
from moe_report import Results, Run
from moe_text import Text, check_same_text, windows
from moe_training import PRESETS, Case, Settings, Training, all_reduce

from fp4comm.transport import run_local

SCRIPT = ranks.ROOT / "benchmarks" / "train_moe.py"
TINY = PRESETS["tiny"]
SETTINGS = Settings("tiny", ("bf16",), ("plain",), (0,), TINY.steps, None, "cpu")
LN_256 = math.log(256)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    lines = (f"the square of {n} is {n * n}\n" for n in range(4000))
    (folder / "squares.txt").write_text("".join(lines))
    return Text(folder, 100)


def train(text, num_ranks, policy="bf16", cache="plain"):
    def on_rank(group):
        with Progress(disable=True) as bar:
            return Training(group, SETTINGS, text, Case(0, policy, cache)).run(TINY.steps, bar)

    return run_local(num_ranks, on_rank)


# Ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_all_reduce_sums_in_place_on_every_rank(num_ranks):
    def on_rank(group):
        tensors = [torch.full(size, 10.0**group.rank) for size in ((2, 3), (1,), (4,))]
        all_reduce(group, tensors)
        return tensors

    for tensors in run_local(num_ranks, on_rank):
        assert [t.shape for t in tensors] == [(2, 3), (1,), (4,)]
        assert all((t == [1, 11, 111][num_ranks - 1]).all() for t in tensors)


def gradients(text, num_ranks, policy="bf16"):
    """Loss, and gradients by name, those of experts put together in order."""

    def on_rank(group):
        training = Training(group, SETTINGS, text, Case(0, policy, "plain"))
        loss, norm = training.backward(0)
        return loss, norm, {n: (p.detach(), p.grad) for n, p in training.model.named_parameters()}

    of_ranks = run_local(num_ranks, on_rank)
    assert len({(loss, norm) for loss, norm, _ in of_ranks}) == 1
    named = {}
    for name in of_ranks[0][2]:
        parts = [parameters[name] for _, _, parameters in of_ranks]
        if name.endswith((".gate_up", ".down")):
            named[name] = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
        else:
            assert all(torch.equal(part[1], parts[0][1]) for part in parts), name
            named[name] = parts[0]
    return of_ranks[0][0], of_ranks[0][1], named


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_weights_are_equal_and_gradients_nearly_on_any_number_of_ranks(text, num_ranks):
    alone_loss, alone_norm, alone = gradients(text, 1)
    loss, norm, spread = gradients(text, num_ranks)
    assert loss == pytest.approx(alone_loss, rel=1e-4)
    assert norm == pytest.approx(alone_norm, rel=1e-2)
    assert spread.keys() == alone.keys()
    for name, (weight, gradient) in spread.items():
        assert torch.equal(weight, alone[name][0]), name
        error = (gradient - alone[name][1]).norm() / alone[name][1].norm()
        assert error < 2e-2, f"{name}: {error}"  # combine rounds to BF16 on each rank


@pytest.mark.parametrize("policy", ["bf16", "mxfp4"])
def test_losses_are_nearly_equal_on_any_number_of_ranks(text, policy):
    alone, *_ = train(text, 1, policy)
    for spread in train(text, 2, policy):
        assert spread.train_loss == pytest.approx(alone.train_loss, rel=2e-3)
        assert [step for step, _ in spread.validation] == [2, 4]
        assert spread.final_loss == pytest.approx(alone.final_loss, rel=2e-3)
    assert alone.train_loss[0] == pytest.approx(LN_256, rel=0.05)
    assert alone.final_loss < 0.95 * LN_256


def test_ranks_share_the_batch_and_again_reverses_it(text):
    def on_rank(group):
        cases = (Case(5, policy, "plain") for policy in ("bf16", "bf16-again"))
        return [Training(group, SETTINGS, text, case).batch(3) for case in cases]

    ((alone, again),) = run_local(1, on_rank)
    spread, _ = zip(*run_local(3, on_rank), strict=True)
    assert torch.equal(torch.cat(spread), alone)
    assert torch.equal(again, alone.flip(0))
    assert len(torch.unique(alone, dim=0)) == TINY.batch


def test_bytes_sent_are_those_of_the_rows(text):
    tokens, layers = TINY.batch * TINY.shape.length, TINY.shape.layers
    (run,) = train(text, 1, "mxfp4")
    rows = tokens * layers  # each token once to the only rank
    assert run.sent_bytes == {
        "dispatch": rows * (32 + 2 + 2 * 6),  # hidden 64: codes, scales, route of two slots
        "combine": rows * 128,
        "dispatch_grad": rows * (64 + 1 + 2 * 4),
        "combine_grad": rows * (64 + 1),
    }
    assert set(run.sent_to_others_bytes.values()) == {0}
    spread, _ = train(text, 2, "mxfp4")
    assert 0 < spread.sent_to_others_bytes["combine"] < spread.sent_bytes["combine"]


@pytest.mark.parametrize("cache", ["packed", "bf16", "recompute"])
def test_expert_layers_train_like_plain_ones_with_each_cache(text, cache):
    (plain,), (layer,) = train(text, 1, "mxfp4"), train(text, 1, "mxfp4", cache)
    assert layer.sent_bytes == plain.sent_bytes
    assert layer.train_loss == pytest.approx(plain.train_loss, rel=2e-3)
    assert layer.final_loss == pytest.approx(plain.final_loss, rel=2e-3)


def test_a_loss_that_is_not_finite_is_an_error_on_every_rank(text, monkeypatch):
    diverging = dataclasses.replace(TINY, learning_rate=math.inf)
    monkeypatch.setitem(moe_training.PRESETS, "tiny", diverging)

    def on_rank(group):
        with Progress(disable=True) as bar:
            training = Training(group, SETTINGS, text, Case(0, "fp8", "plain"))
            with pytest.raises(RuntimeError, match="fp8, seed 0, step 2: expected a finite") as e:
                training.run(TINY.steps, bar)
            return str(e.value)

    assert len(set(run_local(2, on_rank))) == 1


# Text


def test_the_last_twentieth_of_each_text_file_is_held_out(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(bytes(range(1, 101)))
    (tmp_path / "sub" / "b").write_bytes(b"b" * 40)
    (tmp_path / "binary").write_bytes(b"\0" * 1000)
    text = Text(tmp_path, 7)
    assert text.training.tobytes() == bytes(range(1, 96)) + b"b" * 38
    assert text.held_out.tobytes() == bytes(range(96, 101)) + b"bb"
    with pytest.raises(ValueError, match="at least 8 bytes .* got 133 and 7 in 2 files"):
        Text(tmp_path, 8)


def test_a_window_has_one_byte_more_than_it_predicts():
    cut = windows(np.arange(10, dtype=np.uint8), np.array([5, 0]), 4)
    assert cut.tolist() == [[5, 6, 7, 8, 9], [0, 1, 2, 3, 4]]


def test_another_text_on_a_rank_is_an_error_on_all(tmp_path):
    def on_rank(group):
        folder = tmp_path / str(group.rank)
        folder.mkdir()
        (folder / "file").write_text(f"{group.rank // 2} words " * 20)
        with pytest.raises(ValueError, match="same on all ranks, got another on rank 2"):
            check_same_text(group, Text(folder, 1))

    run_local(3, on_rank)


# Results


def made(policy, seed, losses, num_ranks=1, cache="plain"):
    sent = dict.fromkeys(("dispatch", "combine", "dispatch_grad", "combine_grad"), 1e6)
    validation = list(zip((10, 20), losses, strict=True))
    speed = (20, 0.2, 5.0, 1000.0, 10**6)
    return Run(seed, policy, cache, num_ranks, 0, *speed, sent, sent, 1, [3.0, 2.0], validation)


RUNS = [
    made("bf16", 0, (4.0, 2.0)),
    made("mxfp4", 0, (4.4, 2.02)),
    made("bf16", 1, (4.0, 4.0)),
    made("mxfp4", 1, (4.0, 4.12)),
    made("bf16", 0, (4.0, 1.998), num_ranks=2),
    made("mxfp4", 7, (1.0, 1.0), cache="packed"),
]


def test_each_run_is_compared_with_bf16_of_its_seed():
    alone, mxfp4, spread, other = moe_report.compare(RUNS)
    assert alone.differences_percent == []
    assert alone.mean_percent is None
    assert mxfp4.differences_percent == pytest.approx([1.0, 3.0])
    assert mxfp4.mean_percent == pytest.approx(2.0)
    assert mxfp4.spread_percent == pytest.approx(math.sqrt(2))
    assert spread.differences_percent == pytest.approx([-0.1])  # bf16 against bf16
    assert spread.spread_percent is None
    assert other.differences_percent == []  # no bf16 run with seed 7
    assert moe_report.difference_curve(RUNS[1], RUNS) == [
        (10, pytest.approx(10.0)),
        (20, pytest.approx(1.0)),
    ]


def command(*arguments):
    """Run the script's command in this process."""
    train_moe.main([str(a) for a in arguments], standalone_mode=False)


def sitting(**changes):
    about = {"ranks": 1, "transport": "local", "arguments": {"device": "cpu"}, "git": None}
    shape = dataclasses.asdict(TINY.shape)
    setup = {"shape": shape, "batch": 4, "parameters": 1, "steps": 20, "text": "t"} | changes
    return Results(setup, [about | {"machine": {"cpu": "C", "cuda_devices": []}}], RUNS[:2])


def written(path, results):
    path.write_text(json.dumps(results.as_json()))
    return path


def test_files_of_several_sittings_go_together(tmp_path, capsys):
    again = [dataclasses.replace(run, ranks=2) for run in RUNS[:2]]
    parts = {"a.json": sitting(), "b.json": dataclasses.replace(sitting(), runs=again)}
    files = [written(tmp_path / name, part) for name, part in parts.items()]
    both = moe_report.read(files)
    assert [run.sitting for run in both.runs] == [0, 0, 1, 1]
    assert len(both.sittings) == 2
    assert both.runs[1].validation == [[10, 4.4], [20, 2.02]]
    bf16, mxfp4, again, spread = moe_report.compare(both.runs)
    assert bf16.differences_percent == []
    assert again.differences_percent == [0.0]
    assert mxfp4.differences_percent == spread.differences_percent == pytest.approx([1.0])
    command(*files)
    assert "+1.000" in capsys.readouterr().out


def test_files_that_cannot_be_compared_are_refused(tmp_path):
    files = [
        written(tmp_path / "a.json", sitting()),
        written(tmp_path / "b.json", sitting(steps=10)),
    ]
    with pytest.raises(ValueError, match=r"b\.json: expected steps 20 as in .*a\.json, got 10"):
        moe_report.read(files)
    (tmp_path / "c.json").write_text('{"command": "bench"}')
    done = ranks.python(SCRIPT, tmp_path / "c.json")
    assert done.returncode == 2
    assert "c.json: expected a result of train_moe" in done.stdout
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("same", [("a.json", "a.json"), ("a.json", "b.json"), ("twice.json",)])
def test_a_run_counts_once(tmp_path, same):
    written(tmp_path / "a.json", sitting())
    written(tmp_path / "b.json", dataclasses.replace(sitting(), runs=RUNS[1:3]))
    written(tmp_path / "twice.json", dataclasses.replace(sitting(), runs=RUNS[:2] * 2))
    words = r"expected other runs than .*\.json has, got .*, cache plain, 1 rank, seed 0 again"
    with pytest.raises(ValueError, match=words):
        moe_report.read([tmp_path / name for name in same])


def test_the_picture_is_drawn(tmp_path):
    moe_report.draw(dataclasses.replace(sitting(), runs=RUNS), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


# The command


def check_result(file, num_ranks, transport):
    content = json.loads(file.read_text())
    (about,) = content["sittings"]
    assert (about["ranks"], about["transport"]) == (num_ranks, transport)
    assert about["machine"]["cpu"]
    assert about["versions"]["torch"] == torch.__version__
    assert [run["policy"] for run in content["runs"]] == ["bf16", "mxfp4"]
    for run in content["runs"]:
        assert run["ranks"] == num_ranks
        assert run["steps"] == len(run["train_loss"]) == 3
        assert run["peak_bytes"] > 10**7
        assert run["validation"][-1][0] == 3
        assert all(math.isfinite(loss) for loss in run["train_loss"])
    difference = content["comparisons"][1]["mean_percent"]
    assert 0 < abs(difference) < 1
    return content["runs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("words")
    (made / "words").write_text("to be or not to be, that is the question\n" * 200)
    return made


def options(folder, file):
    run = ("--preset", "tiny", "--steps", 3, "--policies", "bf16,mxfp4", "--text", folder)
    return (*run, "--json", file)


def test_under_mpirun_and_alone_it_trains_the_same_model(tmp_path, folder):
    done = ranks.mpirun(2, SCRIPT, *options(folder, tmp_path / "mpi.json"))
    ranks.passed(done)
    assert "mxfp4, seed 0: step 3 of 3, held-out loss" in done.stdout
    assert done.stdout.count("2 ranks (mpi) on") == 1
    command(*options(folder, tmp_path / "alone.json"))
    spread = check_result(tmp_path / "mpi.json", 2, "mpi")
    single = check_result(tmp_path / "alone.json", 1, "local")
    for a, b in zip(spread, single, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=2e-3)


def test_under_torchrun_it_trains(tmp_path, folder):
    ranks.passed(*ranks.torch_ranks(2, SCRIPT, *options(folder, tmp_path / "torch.json")))
    check_result(tmp_path / "torch.json", 2, "torch")


def test_seconds_become_equally_many_steps_of_all(tmp_path, folder):
    arguments = ["--preset", "tiny", "--seconds", "0.2", "--policies", "bf16,fp8", "--text", folder]
    command(*arguments, "--json", tmp_path / "timed.json")
    content = json.loads((tmp_path / "timed.json").read_text())
    assert {run["steps"] for run in content["runs"]} == {content["setup"]["steps"]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policies", "bf16,fp3"], "policies: expected some of bf16, .*, got fp3"),
        (["--cache", "fp4"], "cache: expected some of plain.*, got fp4"),
        (["--seeds", "0,-1"], "seeds: expected whole numbers from 0 on, got '-1'"),
        (["--steps", "3", "--seconds", "3"], "steps: expected without seconds, got both"),
        (["--ranks", "5"], "ranks: expected at most 4, got 5"),
        (["--text", "."], "text: expected at least 64 bytes"),
        (["--seeds", "0,00"], "seeds: expected each once, got 0 again"),
        (["--policies", "fp8,bf16,bf16"], "policies: expected each once, got bf16 again"),
        (["--cache", "plain,plain"], "cache: expected each once, got plain again"),
        (["--seconds", "inf"], "--seconds': expected a finite number, got inf"),
        (["--seconds", "nan"], "--seconds': expected a finite number, got nan"),
        (["--picture", "nowhere/a.png"], "--picture': no such folder: .*nowhere"),
        (["--picture", "."], "--picture': File '.' is a directory"),
        (
            ["--picture", "late.nope"],
            "picture: expected a file that ends in .*png.*, got late.nope",
        ),
        (["--picture", "late"], "picture: expected a file that ends in .*png.*, got late"),
        (["a.json", "--picture", "late.nope"], "picture: expected a file that ends in"),
        (["a.json", "--steps", "3"], "FILES: expected without --preset"),
    ],
)
def test_wrong_options_are_told_before_any_training(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_moe, "train_all", None)
    with pytest.raises(click.ClickException) as raised:
        command("--preset", "tiny", *arguments)
    assert re.search(words, raised.value.format_message())


@pytest.mark.parametrize(
    "given", [("--steps", 3), ("--seeds", 0), ("--ranks", 2), ("--text", "."), ("--device", "cpu")]
)
def test_files_take_no_options_of_a_training(tmp_path, given):
    file = written(tmp_path / "a.json", sitting())
    with pytest.raises(click.UsageError, match=f"FILES: expected without {given[0]}"):
        command(file, *given)
