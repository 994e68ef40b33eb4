import pytest
import torch
from torch import nn

from leyden.base.errors import MisconfigurationException
from leyden.strategies.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    precision_plugin,
    resolve_precision,
)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        (None, "32-true"),
        (32, "32-true"),
        ("32", "32-true"),
        ("32-true", "32-true"),
        (64, "64-true"),
        ("64", "64-true"),
        (16, "16-mixed"),
        ("16", "16-mixed"),
        ("16-mixed", "16-mixed"),
        ("16-true", "16-true"),
        ("bf16", "bf16-mixed"),
        ("bf16-mixed", "bf16-mixed"),
        ("bf16-true", "bf16-true"),
    ],
)
def test_spellings(spelling, name):
    assert resolve_precision(spelling) == name


@pytest.mark.parametrize("spelling", ["fp16", 8, "33", True, 16.5])
def test_unknown_spelling_lists_the_known_ones(spelling):
    with pytest.raises(ValueError, match=r"is unknown; use one of '16-mixed', '16-true', '32-true'"):
        resolve_precision(spelling)


def test_transformer_engine_is_known_and_absent():
    with pytest.raises(ValueError, match="'transformer-engine' is not in this version"):
        resolve_precision("transformer-engine")


@pytest.mark.parametrize(
    ("name", "cls", "plain"),
    [
        ("32-true", Precision, True),
        ("64-true", DoublePrecision, False),
        ("bf16-true", HalfPrecision, False),
        ("16-true", HalfPrecision, False),
        ("bf16-mixed", MixedPrecision, False),
    ],
)
def test_plugins(name, cls, plain):
    plugin = precision_plugin(name, "cpu")
    assert type(plugin) is cls
    assert plugin.precision == name
    assert plugin.is_plain is plain
    assert plugin.state_dict() == {}


def test_16_mixed_becomes_bf16_on_the_cpu():
    with pytest.warns(UserWarning, match="using 'bf16-mixed' instead"):
        plugin = precision_plugin(16, "cpu")
    assert plugin.precision == "bf16-mixed"
    assert plugin.scaler is None


def test_subclass_that_touches_the_step_is_not_plain():
    class Own(Precision):
        def convert_input(self, data):
            return data

    class Quiet(Precision):
        def state_dict(self):
            return {"a": 1}

    assert not Own().is_plain
    assert Quiet().is_plain


@pytest.mark.parametrize(
    ("plugin", "dtype"),
    [
        (DoublePrecision(), torch.float64),
        (HalfPrecision("bf16-true"), torch.bfloat16),
        (HalfPrecision("16-true"), torch.float16),
    ],
)
def test_true_precision_casts_weights_inputs_and_new_tensors(plugin, dtype):
    module = plugin.convert_module(nn.Linear(2, 2))
    assert module.weight.dtype == dtype
    batch = {"x": torch.ones(2), "y": (torch.ones(2, dtype=torch.long), "text")}
    converted = plugin.convert_input(batch)
    assert converted["x"].dtype == dtype
    assert converted["y"][0].dtype == torch.long
    assert converted["y"][1] == "text"
    assert plugin.convert_input(torch.ones(1)).dtype == dtype
    for context in (plugin.forward_context, plugin.module_init_context, plugin.tensor_init_context):
        with context():
            assert torch.zeros(1).dtype == dtype
        assert torch.zeros(1).dtype == torch.float32
    with pytest.raises(KeyError), plugin.train_step_context():
        raise KeyError
    assert torch.get_default_dtype() == torch.float32


def test_mixed_precision_runs_matrix_products_in_16_bit():
    plugin = MixedPrecision("bf16-mixed", "cpu")
    layer = nn.Linear(2, 2)
    for context in ("train_step", "val_step", "test_step", "predict_step"):
        with getattr(plugin, f"{context}_context")():
            assert layer(torch.ones(1, 2)).dtype == torch.bfloat16


def test_weights_used_under_no_grad_first_still_get_gradients():
    # With autocast's weight cache, the copy that no_grad made would be used again, without a graph.
    plugin = MixedPrecision("bf16-mixed", "cpu")
    layer = nn.Linear(2, 2)
    with plugin.train_step_context():
        with torch.no_grad():
            layer(torch.ones(1, 2))
        loss = layer(torch.ones(1, 2)).sum()
    loss.backward()
    assert layer.weight.grad is not None


def test_mixed_precision_arguments():
    with pytest.raises(ValueError, match=r"precision='32-true'\) must be '16-mixed' or 'bf16-mixed'"):
        MixedPrecision("32-true", "cpu")
    with pytest.raises(MisconfigurationException, match="bfloat16 needs no scaler"):
        MixedPrecision("bf16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="'bf16-true' or '16-true'"):
        HalfPrecision("32-true")
    own = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert MixedPrecision("16-mixed", "cpu", scaler=own).scaler is own


def _scaled(init_scale=1024.0, optimizer=torch.optim.SGD):
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=init_scale))
    weight = nn.Parameter(torch.tensor([1.0]))
    return plugin, weight, optimizer([weight], lr=0.1)


def test_scaler_scales_the_loss_and_hooks_see_true_gradients():
    plugin, weight, optimizer = _scaled()
    seen = []

    def closure():
        loss = (3 * weight).sum()
        scaled = plugin.pre_backward(loss)
        assert scaled.item() == pytest.approx(3 * 1024)
        scaled.backward()
        return loss.detach()

    plugin.optimizer_step(optimizer, closure=closure, before_step=lambda _: seen.append(weight.grad.item()))
    assert seen == [3.0]
    assert weight.item() == pytest.approx(0.7)


def test_scaler_skips_a_step_with_gradients_that_are_not_finite_and_lowers_the_scale():
    plugin, weight, optimizer = _scaled()

    def closure():
        plugin.pre_backward((float("inf") * weight).sum()).backward()
        return torch.tensor(1.0)

    plugin.optimizer_step(optimizer, closure=closure)
    assert weight.item() == 1.0
    assert plugin.state_dict()["scale"] == 512.0
    restored = MixedPrecision("16-mixed", "cpu")
    restored.load_state_dict(plugin.state_dict())
    assert restored.state_dict()["scale"] == 512.0


def test_scaler_does_nothing_when_training_step_was_skipped():
    plugin, weight, optimizer = _scaled()
    hooks = []
    assert plugin.optimizer_step(optimizer, closure=lambda: None, before_step=hooks.append) is None
    assert hooks == [optimizer]
    assert weight.item() == 1.0


def test_scaler_steps_in_manual_optimisation_where_the_closure_is_empty():
    plugin, weight, optimizer = _scaled()
    module = nn.Module()
    module.automatic_optimization = False
    plugin.pre_backward((2 * weight).sum()).backward()
    plugin.optimizer_step(optimizer, closure=lambda: None, model=module)
    assert weight.item() == pytest.approx(0.8)


def test_scaler_refuses_lbfgs_and_clipping_of_fused_optimizers():
    plugin, _, optimizer = _scaled(optimizer=torch.optim.LBFGS)
    with pytest.raises(MisconfigurationException, match="LBFGS evaluates the loss several times"):
        plugin.optimizer_step(optimizer, closure=lambda: torch.tensor(1.0))
    plugin, _, optimizer = _scaled()
    optimizer._step_supports_amp_scaling = True
    with pytest.raises(RuntimeError, match="SGD unscales gradients inside its step"):
        plugin.clip_gradients(optimizer, 1.0)
    plugin.clip_gradients(optimizer, None)


def test_step_without_a_scaler_passes_closure_and_arguments():
    weight = nn.Parameter(torch.tensor([1.0]))
    calls = []

    class Recording(torch.optim.SGD):
        def step(self, closure=None, **kwargs):
            calls.append(kwargs)
            return closure()

    optimizer = Recording([weight], lr=0.1)
    assert Precision().optimizer_step(optimizer, closure=lambda: 5, extra=1) == 5
    assert Precision().optimizer_step(optimizer, closure=lambda: 6, before_step=calls.append) == 6
    assert calls == [{"extra": 1}, {}, optimizer]


def test_clipping():
    weights = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:]}], lr=0.1)

    def reset():
        weights[0].grad, weights[1].grad = torch.tensor([3.0]), torch.tensor([4.0])

    plugin = Precision()
    reset()
    plugin.clip_gradients(optimizer, 1.0)
    assert [w.grad.item() for w in weights] == pytest.approx([0.6, 0.8], abs=1e-5)
    reset()
    plugin.clip_gradients(optimizer, 2.0, gradient_clip_algorithm="value")
    assert [w.grad.item() for w in weights] == [2.0, 2.0]
    reset()
    for nothing in (0, None, -1):
        plugin.clip_gradients(optimizer, nothing)
    assert [w.grad.item() for w in weights] == [3.0, 4.0]
    with pytest.raises(MisconfigurationException, match="gradient_clip_algorithm='max' is unknown"):
        plugin.clip_gradients(optimizer, 1.0, "max")
