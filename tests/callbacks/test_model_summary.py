import logging
import sys

import pytest
import torch
from fake_run import FakeTrainer
from torch import nn

import leyden as L
from leyden.callbacks import ModelSummary, RichModelSummary
from leyden.callbacks.summary_data import (
    LayerSummary,
    get_formatted_model_size,
    get_human_readable_count,
    parse_batch_shape,
    summarize,
)


@pytest.fixture(autouse=True)
def caplog_sees_leyden(monkeypatch):
    monkeypatch.setattr(logging.getLogger("leyden"), "propagate", True)


def net(root, example=True, kind="plain"):
    class Net(root):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Sequential(nn.ReLU(), nn.Linear(16, 4)))
            self.head = nn.Linear(4, 2)
            self.unused = nn.Linear(300, 400)
            if kind == "extra":
                self.scale = nn.Parameter(torch.zeros(5))
            for parameter in self.unused.parameters():
                parameter.requires_grad = False
            if example:
                self.example_input_array = {"tuple": (torch.zeros(3, 8),), "dict": {"x": torch.zeros(3, 8)}}.get(
                    kind, torch.zeros(3, 8)
                )
            self.unused.eval()

        def forward(self, x):
            return self.head(self.body(x))

    return Net()


@pytest.mark.parametrize("depth", [-1, 1, 2, 3])
@pytest.mark.parametrize("kind", ["plain", "extra", "tuple", "dict"])
def test_says_what_lightnings_says(depth, kind):
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.model_summary import summarize as theirs

    ours, other = summarize(net(L.LightningModule, kind=kind), depth), theirs(net(pl.LightningModule, kind=kind), depth)
    for name in (
        "layer_names", "layer_types", "in_sizes", "out_sizes", "param_nums", "training_modes", "total_training_modes",
        "total_parameters", "trainable_parameters", "model_size", "total_flops",
    ):  # fmt: skip
        assert (
            getattr(ours, name) == pytest.approx(getattr(other, name))
            if name == "model_size"
            else getattr(ours, name) == getattr(other, name)
        ), name
    assert list(ours.flop_counts.values()) == [sum(counts.values()) for counts in other.flop_counts.values()]
    if depth == 1:
        mine, its = dict(ours._get_summary_data()), dict(other._get_summary_data())
        assert mine == its
        assert str(ours).splitlines()[0] == str(other).splitlines()[0]


def test_without_an_example_there_are_no_shapes_and_flops():
    summary = summarize(net(L.LightningModule, example=False))
    assert [title for title, _ in summary._get_summary_data()] == [" ", "Name", "Type", "Params", "Mode"]
    assert "FLOPs" not in str(summary)
    assert "120 K     Non-trainable params" in str(summary)
    assert summary.total_flops == 0


def test_leaves_the_model_and_the_random_state_alone():
    class Noisy(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.frozen = nn.Dropout().eval()
            self.example_input_array = torch.ones(4, 3)

        def forward(self, x):
            assert not self.training
            assert not torch.is_grad_enabled()
            return self.frozen(self.norm(x)) + torch.rand_like(x)

    model = Noisy()
    before = torch.get_rng_state()
    summarize(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert (model.training, model.norm.training, model.frozen.training) == (True, True, False)
    assert model.norm.num_batches_tracked == 0
    assert not model.norm._forward_hooks


def test_modes_come_back_after_a_failure():
    class Wrong(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.example_input_array = torch.ones(4, 3)

        def forward(self, x):
            return self.layer(x)

    model = Wrong()
    with pytest.raises(RuntimeError):
        summarize(model)
    assert model.training
    assert model.layer.training
    assert not model.layer._forward_hooks


def test_size_follows_the_types_of_the_parameters():
    model = net(L.LightningModule, example=False)
    full = summarize(model).model_size
    assert summarize(model.to(torch.bfloat16)).model_size == pytest.approx(full / 2)
    assert full == pytest.approx(summarize(model).total_parameters * 4e-6)


def test_lazy_parameters_warn():
    class Lazy(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.LazyLinear(3)

    with pytest.warns(UserWarning, match="lazy parameters"):
        assert summarize(Lazy()).total_parameters == 0


@pytest.mark.parametrize("number", [0, 1, 123, 999, 1000, 1234, 99_999, 123_456, 2e6, 3e9, 4e14, 5e15, 999_999])
def test_counts_are_lightnings(number):
    from lightning.pytorch.utilities.model_summary import get_human_readable_count as theirs

    assert get_human_readable_count(number) == theirs(number)


def test_small_parts():
    with pytest.raises(ValueError, match="can't be negative"):
        get_human_readable_count(-1)
    with pytest.raises(ValueError, match="max_depth=-2"):
        summarize(net(L.LightningModule), -2)
    assert get_formatted_model_size(1234.5) == "1,234.500"
    assert parse_batch_shape([torch.zeros(2), (torch.zeros(1, 1), "x")]) == [[2], [[1, 1], "?"]]
    layer = nn.Conv2d(3, 8, 3)
    summary = LayerSummary(layer)
    assert (summary.num_parameters, summary.layer_type, summary.in_size) == (224, "Conv2d", "?")
    layer(torch.rand(1, 3, 5, 5))
    assert (summary.in_size, summary.out_size) == ([1, 3, 5, 5], [1, 8, 3, 3])


def test_the_callback_logs_on_rank_zero_only(caplog):
    model = net(L.LightningModule)
    trainer = FakeTrainer()
    with caplog.at_level("INFO", logger="leyden"):
        ModelSummary(max_depth=0).on_fit_start(trainer, model)
        trainer.is_global_zero = False
        ModelSummary().on_fit_start(trainer, model)
        assert caplog.messages == []
        trainer.is_global_zero = True
        ModelSummary(max_depth=1).on_fit_start(trainer, model)
    assert "| body   | Sequential" in caplog.text
    assert caplog.messages[0] == "\n" + str(summarize(model))


def test_the_rich_one_prints_a_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    RichModelSummary(max_depth=2, header_style="red").on_fit_start(FakeTrainer(), net(L.LightningModule))
    out = capsys.readouterr().out
    for text in ("body.0", "Linear", "[3, 8]", "Total FLOPs", "Non-trainable params", "unused"):
        assert text in out, text


def test_a_summary_of_ones_own():
    seen = {}

    class Mine(ModelSummary):
        @staticmethod
        def summarize(summary_data, total_parameters, *args, **kwargs):
            seen.update(kwargs, total=total_parameters, columns=[title for title, _ in summary_data])

    Mine(max_depth=1, colour="blue").on_fit_start(FakeTrainer(), net(L.LightningModule))
    assert seen["colour"] == "blue"
    assert seen["total"] == 120_400 + 144 + 32 + 68 + 10
    assert "Out sizes" in seen["columns"]


def test_importing_the_callbacks_imports_no_rich():
    import subprocess

    code = (
        "import sys\nfrom leyden.callbacks import *\n"
        "RichProgressBar(), TQDMProgressBar(), RichModelSummary(), Timer(), EarlyStopping('x')\n"
        "print([m for m in ('rich', 'tensorboard', 'yaml', 'torchmetrics') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
