"""The same training by each framework: a 784-32-10 perceptron, batches of 32 in memory, Adam.

Every arm gets its batches from a `BatchSource`, which is the only place where a clock is read. No arm needs a hook
or a callback to be measured, so the measurement costs each of them the same.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH_SIZE, FEATURES, HIDDEN, CLASSES = 32, 784, 32, 10
DISTINCT_BATCHES = 50
LEARNING_RATE = 1e-3


class BatchSource:
    """Hands out prebuilt batches and notes when.

    Args:
        batches: The distinct batches, repeated in order.
        steps: Batches in all, over all epochs.
        epochs: Number of passes; each pass has ``steps // epochs`` batches.
        warmup: The clock starts when batch ``warmup`` (0-based) is handed out, and stops at the last batch.
        on_batch: Called with the number of batches handed out so far, before each one (for counting).
    """

    def __init__(
        self,
        batches: list[Any],
        steps: int,
        epochs: int = 1,
        warmup: int = 0,
        on_batch: Callable[[int], None] | None = None,
    ) -> None:
        if steps % epochs:
            raise ValueError(f"steps={steps} is no multiple of epochs={epochs}")
        if not 0 <= warmup < steps - 1:
            raise ValueError(f"warmup={warmup} must lie between 0 and steps - 2 = {steps - 2}")
        self.batches = batches
        self.per_epoch = steps // epochs
        self.last = steps - 1
        self.warmup = warmup
        self.on_batch = on_batch
        self.handed_out = 0
        self.start = self.stop = (0.0, 0.0)

    def __len__(self) -> int:
        return self.per_epoch

    def __iter__(self) -> Iterator[Any]:
        batches, count = self.batches, len(self.batches)
        for _ in range(self.per_epoch):
            number = self.handed_out
            if number == self.warmup:
                self.start = (time.perf_counter(), time.process_time())
            elif number == self.last:
                self.stop = (time.perf_counter(), time.process_time())
            if self.on_batch is not None:
                self.on_batch(number)
            self.handed_out = number + 1
            yield batches[number % count]

    def microseconds(self) -> tuple[float, float]:
        """Wall and processor time (all threads) per step, between the two marks."""
        if self.handed_out != self.last + 1:
            raise RuntimeError(f"the arm took {self.handed_out} batches where {self.last + 1} were to be trained")
        steps = self.last - self.warmup
        return tuple((b - a) / steps * 1e6 for a, b in zip(self.start, self.stop, strict=True))  # type: ignore


def make_batches() -> list[tuple[Tensor, Tensor]]:
    """Random images and labels, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(BATCH_SIZE, FEATURES, generator=generator),
            torch.randint(CLASSES, (BATCH_SIZE,), generator=generator),
        )
        for _ in range(DISTINCT_BATCHES)
    ]


def make_model() -> nn.Sequential:
    """The perceptron, with the same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def make_optimizer(model: nn.Module) -> torch.optim.Adam:
    """Adam with torch's defaults but a written-down learning rate."""
    return torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)


def run_raw(source: BatchSource, epochs: int, folder: str) -> nn.Module:
    """The loop that everybody writes."""
    model = make_model()
    optimizer = make_optimizer(model)
    for _ in range(epochs):
        for x, y in source:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    return model


def run_trainer(root: str, full: bool, source: BatchSource, epochs: int, folder: str) -> nn.Module:
    """Lightning and Leyden: one script, two import roots.

    Args:
        root: ``"leyden"`` or ``"lightning.pytorch"``.
        full: With `self.log(prog_bar=True)`, CSV logger, progress bar and checkpoints; else with all of them off.
    """
    L = importlib.import_module(root)

    class Perceptron(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.model(x), y)
            if full:
                self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    if full:
        features = {"logger": importlib.import_module(f"{root}.loggers").CSVLogger(folder)}
    else:
        names = ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary")
        features = dict.fromkeys(names, False)
    module = Perceptron()
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, default_root_dir=folder, **features)
    trainer.fit(module, source)
    return module.model


def run_accelerate(source: BatchSource, epochs: int, folder: str) -> nn.Module:
    """Accelerate's documented loop: prepared model and optimizer, `accumulate`, `accelerator.backward`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model()
    # The batches lie in memory, on the right device: preparing a loader would add only the loader's own cost.
    prepared, optimizer = accelerator.prepare(model, make_optimizer(model))
    for _ in range(epochs):
        for x, y in source:
            with accelerator.accumulate(prepared):
                optimizer.zero_grad()
                loss = F.cross_entropy(prepared(x), y)
                accelerator.backward(loss)
                optimizer.step()
    return model


def run_ignite(source: BatchSource, epochs: int, folder: str) -> nn.Module:
    """Ignite's engine without handlers."""
    from ignite.engine import Engine

    model = make_model()
    optimizer = make_optimizer(model)

    def train_step(engine: Engine, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    Engine(train_step).run(source, max_epochs=epochs)
    return model


def run_hf_trainer(source: BatchSource, epochs: int, folder: str) -> nn.Module:
    """Transformers' Trainer with everything off that the bare arms have off, and no clipping."""
    from transformers import Trainer, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.model(x), labels)}

    class InMemory(Trainer):
        def get_train_dataloader(self) -> Any:
            return source

    source.batches = [{"x": x, "labels": y} for x, y in source.batches]
    module = WithLoss()
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=epochs,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    InMemory(module, arguments, optimizers=(make_optimizer(module), None)).train()
    return module.model


def run(arm: str, source: BatchSource, epochs: int) -> float:
    """Trains by ``arm`` in a temporary folder and returns the sum of absolute weights at its end.

    The sum is the same for all arms when all have done the same work.
    """
    functions: dict[str, Callable[[BatchSource, int, str], nn.Module]] = {
        "raw": run_raw,
        "leyden_bare": lambda *a: run_trainer("leyden", False, *a),
        "leyden_full": lambda *a: run_trainer("leyden", True, *a),
        "lightning_bare": lambda *a: run_trainer("lightning.pytorch", False, *a),
        "lightning_full": lambda *a: run_trainer("lightning.pytorch", True, *a),
        "accelerate": run_accelerate,
        "ignite": run_ignite,
        "hf_trainer": run_hf_trainer,
    }
    with tempfile.TemporaryDirectory() as folder:
        gc.collect()
        model = functions[arm](source, epochs, folder)
    return sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())


def time_arm(arm: str, steps: int, epochs: int, warmup: int, repeats: int) -> list[dict[str, float]]:
    """Times raw, arm, raw, arm, ..., raw in this process.

    Each run of the arm is compared with the mean of its two neighbours: same process, same heap, same moment.

    Returns:
        For each run of the arm: ``us`` and ``cpu_us`` per step, ``raw_us`` and ``raw_cpu_us`` of its neighbours,
        ``fit_s`` (the whole call, set-up and tear-down included) and ``checksum``.
    """
    torch.set_num_threads(1)
    batches = make_batches()

    def once(name: str, steps: int = steps, warmup: int = warmup) -> dict[str, float]:
        source = BatchSource(list(batches), steps, epochs, warmup)
        began = time.perf_counter()
        checksum = run(name, source, epochs)
        fit_s = time.perf_counter() - began
        us, cpu_us = source.microseconds()
        return {"us": us, "cpu_us": cpu_us, "fit_s": fit_s, "checksum": checksum}

    once("raw", 200 * epochs)
    once(arm, 20 * epochs, 0)  # imports, and everything else that a framework does once per process
    before = once("raw")
    results = []
    for _ in range(repeats):
        own, after = once(arm), once("raw")
        own["raw_us"] = (before["us"] + after["us"]) / 2
        own["raw_cpu_us"] = (before["cpu_us"] + after["cpu_us"]) / 2
        results.append(own)
        before = after
    return results


def count_arm(arm: str, packages: tuple[str, ...], steps: int, epochs: int, warmup: int) -> dict[str, Any]:
    """Counts Python function calls per step: in ``packages`` (the arm's framework), and in all of Python.

    A call belongs to the framework when the function's module does; generated code (a dataclass's methods) counts
    too, since it runs in the module's globals. Calls in other threads are not seen.

    Returns:
        ``framework``: mean calls per step in ``packages``; ``framework_max``: in the busiest step;
        ``all``: mean calls per step in any Python code, torch and the script included; ``where``: the functions of
        the framework called most, as ``{"module.function": calls per step}``.
    """
    torch.set_num_threads(1)
    total = own = 0
    per_step: list[tuple[int, int]] = []
    where: dict[Any, int] = {}

    def on_event(frame: Any, event: str, argument: Any) -> None:
        nonlocal total, own
        if event != "call":
            return
        total += 1
        if frame.f_globals.get("__name__", "").split(".")[0] in packages:
            own += 1
            if len(per_step) > warmup:
                where[frame.f_code] = where.get(frame.f_code, 0) + 1

    batches = make_batches()
    run(arm, BatchSource(batches, 2 * epochs, epochs), epochs)
    source = BatchSource(batches, steps, epochs, warmup, on_batch=lambda _: per_step.append((own, total)))
    sys.setprofile(on_event)
    try:
        run(arm, source, epochs)
    finally:
        sys.setprofile(None)
    window = per_step[warmup:]
    counted = len(window) - 1
    top = sorted(where.items(), key=lambda item: -item[1])[:40]
    return {
        "framework": (window[-1][0] - window[0][0]) / counted,
        "framework_max": max(b[0] - a[0] for a, b in itertools.pairwise(window)),
        "all": (window[-1][1] - window[0][1]) / counted,
        "where": {
            f"{_short(code.co_filename)}:{getattr(code, 'co_qualname', code.co_name)}": n / counted for code, n in top
        },
    }


def _short(filename: str) -> str:
    return filename.split("site-packages/")[-1].split("/src/")[-1]
