import pytest
from fake_run import FakeTrainer

import leyden as L
from leyden.base.errors import MisconfigurationException
from leyden.callbacks import GradientAccumulationScheduler, LambdaCallback
from leyden.core.hooks import HOOKS, is_overridden


def test_lambda_callback_calls_what_it_was_given():
    seen = []
    names = [name for name, hook in HOOKS.items() if hook.callback]
    callback = LambdaCallback(**{name: lambda *args, _name=name: seen.append(_name) for name in names})
    for name in names:
        assert is_overridden(name, callback)
    FakeTrainer(callback, epochs=1, train=1, val=(1,)).fit()
    assert seen[0] == "setup"
    assert seen[-1] == "teardown"
    assert {"on_train_batch_end", "on_sanity_check_start", "on_validation_epoch_end"} <= set(seen)
    assert not is_overridden("on_fit_start", LambdaCallback(setup=print, on_fit_start=None))


def test_lambda_callback_takes_what_lightnings_takes():
    import inspect

    from lightning.pytorch.callbacks import LambdaCallback as Theirs

    for name in inspect.signature(Theirs.__init__).parameters:
        if name != "self":
            LambdaCallback(**{name: print})
    with pytest.raises(TypeError, match="did you mean 'on_train_start'"):
        LambdaCallback(on_training_start=print)
    with pytest.raises(TypeError, match="must be a function, not int"):
        LambdaCallback(setup=3)


@pytest.mark.parametrize("scheduling", [{4: 2}, {0: 3, 2: 1, 5: 8}, {1: 2, 3: 4}])
def test_accumulation_factors_are_lightnings(scheduling):
    from lightning.pytorch.callbacks import GradientAccumulationScheduler as Theirs

    given = dict(scheduling)
    ours, theirs = GradientAccumulationScheduler(scheduling), Theirs(dict(scheduling))
    assert scheduling == given
    for epoch in range(8):
        assert ours.get_accumulate_grad_batches(epoch) == theirs.get_accumulate_grad_batches(epoch)
    assert ours.going_to_accumulate_grad_batches() == theirs.going_to_accumulate_grad_batches()


def test_accumulation_sets_the_trainer():
    callback = GradientAccumulationScheduler({1: 4})
    seen = []
    trainer = FakeTrainer(callback, epochs=3, train=1, val=())
    trainer.lightning_module = L.LightningModule()
    trainer.fit(after_step=lambda trainer: seen.append(trainer.accumulate_grad_batches))
    assert seen == [1, 4, 4]


def test_accumulation_refuses():
    with pytest.raises(TypeError, match="at least one entry"):
        GradientAccumulationScheduler({})
    with pytest.raises(MisconfigurationException, match="epoch -1 must be an int of 0 or more"):
        GradientAccumulationScheduler({-1: 2})
    with pytest.raises(MisconfigurationException, match="factor 0 must be an int of 1 or more"):
        GradientAccumulationScheduler({1: 0})
    callback = GradientAccumulationScheduler({1: 2})

    class Own(L.LightningModule):
        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)

    module, trainer = Own(), FakeTrainer(callback)
    with pytest.warns(UserWarning, match="optimizer_step of the module"):
        callback.on_train_start(trainer, module)
    trainer.accumulate_grad_batches = 2
    with pytest.raises(ValueError, match="accumulate_grad_batches=2 and"):
        callback.on_train_start(trainer, module)
    trainer.strategy.handles_gradient_accumulation = True
    with pytest.raises(RuntimeError, match="accumulates gradients by itself"):
        callback.on_train_start(trainer, module)
    module.automatic_optimization = False
    with pytest.raises(RuntimeError, match="manual optimization"):
        callback.on_train_start(trainer, module)


def test_names_and_module_paths_of_lightning():
    import importlib

    import leyden.callbacks as ours

    for path, names in {
        "callback": ["Callback"],
        "early_stopping": ["EarlyStopping"],
        "gradient_accumulation_scheduler": ["GradientAccumulationScheduler"],
        "lambda_function": ["LambdaCallback"],
        "lr_monitor": ["LearningRateMonitor"],
        "model_checkpoint": ["ModelCheckpoint"],
        "model_summary": ["ModelSummary"],
        "progress": ["ProgressBar", "RichProgressBar", "TQDMProgressBar"],
        "progress.progress_bar": ["ProgressBar"],
        "progress.rich_progress": ["RichProgressBar", "RichProgressBarTheme"],
        "progress.tqdm_progress": ["TQDMProgressBar", "Tqdm", "convert_inf"],
        "rich_model_summary": ["RichModelSummary"],
        "timer": ["Timer", "Interval"],
    }.items():
        module = importlib.import_module(f"leyden.callbacks.{path}")
        for name in names:
            assert getattr(module, name) is getattr(ours, name, getattr(module, name))
