"""A trainer that only counts: it calls a callback's hooks in the order of a real run."""

import time
from types import SimpleNamespace

from leyden.base.states import RunningStage, TrainerFn, TrainerState


class FakeTrainer:
    """The part of the Trainer that callbacks read, and loops that call hooks around nothing."""

    def __init__(self, *callbacks, epochs=2, train=4, val=(2,), test=(3,), predict=(3,), step_seconds=0.0, loggers=()):
        self.callbacks = list(callbacks)
        self.max_epochs, self.max_steps, self.global_step, self.current_epoch = epochs, -1, 0, 0
        self.num_training_batches = train
        self.num_val_batches = list(val)
        self.num_sanity_val_batches = [min(2, n) for n in val]
        self.num_test_batches, self.num_predict_batches = list(test), list(predict)
        self.check_val_every_n_epoch, self.val_check_interval = 1, 1.0
        self.enable_validation = bool(val)
        self.is_global_zero, self.world_size, self.global_rank = True, 1, 0
        self.state = TrainerState()
        self.sanity_checking = self.should_stop = self.fast_dev_run = False
        self.loggers = list(loggers)
        self.progress_bar_metrics, self.callback_metrics = {}, {}
        self.metric_reads = 0
        self.strategy = SimpleNamespace(
            world_size=1,
            broadcast=lambda obj, src=0: obj,
            reduce_boolean_decision=lambda decision, all=True: decision,
            handles_gradient_accumulation=False,
        )
        self.lightning_module = SimpleNamespace(automatic_optimization=True)
        self.step_seconds = step_seconds
        self.accumulate_grad_batches = 1
        self.should_update_logs = True
        self.lr_scheduler_configs, self.optimizers = [], []
        self.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))

    @property
    def progress_bar_callback(self):
        return self.callbacks[0]

    def call(self, hook, *args):
        for callback in self.callbacks:
            getattr(callback, hook)(self, self.lightning_module, *args)

    def _eval(self, kind, counts):
        self.call(f"on_{kind}_start")
        self.call(f"on_{kind}_epoch_start")
        for loader, count in enumerate(counts):
            for index in range(count):
                self.call(f"on_{kind}_batch_start", None, index, loader)
                time.sleep(self.step_seconds)
                self.call(f"on_{kind}_batch_end", None, None, index, loader)
        self.call(f"on_{kind}_epoch_end")
        self.call(f"on_{kind}_end")

    def sanity(self):
        self.sanity_checking = True
        self.call("on_sanity_check_start")
        self._eval("validation", self.num_sanity_val_batches)
        self.call("on_sanity_check_end")
        self.sanity_checking = False

    def fit(self, sanity=True, start_batch=0, after_step=lambda trainer: None):
        self.state.fn = TrainerFn.FITTING
        self.call("setup", "fit")
        self.call("on_fit_start")
        if sanity and self.num_val_batches:
            self.sanity()
        self.state.stage = RunningStage.TRAINING
        self.call("on_train_start")
        while self.current_epoch < self.max_epochs and not self.should_stop:
            self.call("on_train_epoch_start")
            for index in range(start_batch, int(self.num_training_batches)):
                self.call("on_train_batch_start", None, index)
                time.sleep(self.step_seconds)
                self.global_step += 1
                self.fit_loop.epoch_loop._batches_that_stepped += 1
                self.progress_bar_metrics["train_loss"] = 1.0 / self.global_step
                after_step(self)
                self.call("on_train_batch_end", {}, None, index)
            start_batch = 0
            if self.num_val_batches:
                self._eval("validation", self.num_val_batches)
                self.progress_bar_metrics["val_acc"] = 0.9
            self.call("on_train_epoch_end")
            self.current_epoch += 1
        self.call("on_train_end")
        self.call("on_fit_end")
        self.call("teardown", "fit")

    def evaluate(self, kind="test"):
        self.state.fn = {
            "test": TrainerFn.TESTING,
            "validation": TrainerFn.VALIDATING,
            "predict": TrainerFn.PREDICTING,
        }[kind]
        counts = {
            "test": self.num_test_batches,
            "validation": self.num_val_batches,
            "predict": self.num_predict_batches,
        }
        self.call("setup", self.state.fn.value)
        self._eval(kind, counts[kind])
        self.call("teardown", self.state.fn.value)
