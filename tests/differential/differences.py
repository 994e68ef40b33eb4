"""The intended differences from Lightning 2.6, each with its reason; `docs/differences.md` tells users the same.

A mismatch that no entry covers fails its test, and so does an entry that covers nothing any more.
"""

from dataclasses import dataclass

__all__ = ["DIFFERENCES", "Difference"]


@dataclass(frozen=True)
class Difference:
    """One intended difference.

    Attributes:
        script: Name of the script that shows it; an ``fnmatch`` pattern where several do.
        path: ``fnmatch`` pattern for `Mismatch.path`; ``*`` also matches ``/``.
        reason: Why Leyden differs, in one sentence for a user.
        rtol: When set, only numbers that agree to this relative tolerance are covered.
    """

    script: str
    path: str
    reason: str
    rtol: float | None = None


def _several(script: str, paths: tuple[str, ...], reason: str) -> tuple[Difference, ...]:
    return tuple(Difference(script, path, reason) for path in paths)


_AFTER_LAST_BATCH = (
    "A file written between an epoch's last batch and the validation then due: the validation is made up for."
)
_EXACT_POSITION = (
    "After a resume inside an epoch, data go on behind the last batch that was trained on, not from the start."
)

_COUNTERS = (
    "Files hold the counters that a resume needs; Lightning's of single optimizer and scheduler steps and of "
    "validation batches, which it does not need to go on, are not kept."
)
_TRAINED = (
    "A file written while a batch is in hand counts the batches that were trained on; Lightning also the one in hand."
)
_BETWEEN = (
    "A file written between epochs has no counts of the epoch before, so that `max_steps` can't mislead a resume."
)
_DEFERRED = (
    "A step or time save that validation follows is made after it, with the new score; Lightning makes it with the old "
    "one, or not at all."
)

DIFFERENCES: tuple[Difference, ...] = (
    Difference("*", "*/stopping_reason_message", "The texts are our own."),
    Difference("*", "*/fit_loop/state_dict/<root>_position", "A checkpoint says where training goes on, to the batch."),
    Difference(
        "*",
        "*/fit_loop/state_dict/<root>_metrics*",
        "A checkpoint holds `callback_metrics`, so that a resumed run can step its plateau schedulers as if unbroken.",
    ),
    # `test_files_both_ways.py` proves that both of these end with the weights of the unbroken run.
    *_several(
        "resume_mid_epoch_plain_loader",
        tuple(
            f"facts/batch end.{part}/*" for part in ("resumed", "callback_metrics", "logged_metrics", "weights", "csv")
        ),
        _EXACT_POSITION,
    ),
    *_several(
        "resume_at_last_batch",
        ("facts/last batch.resumed/*", "facts/last batch.csv/*", "facts/last batch.counters/epochs/*"),
        _AFTER_LAST_BATCH,
    ),
    Difference(
        "resume_with_plateau",
        "trace/*/epoch(*",
        "A plateau step that was due when a checkpoint was written is made by the run that goes on from it.",
    ),
    # checkpoints
    *_several(
        "*",
        (
            "*fit_loop/epoch_loop.automatic_optimization.optim_progress/*",
            "*fit_loop/epoch_loop.manual_optimization.optim_step_progress/*",
            "*fit_loop/epoch_loop.scheduler_progress/*",
            "*fit_loop/epoch_loop.val_loop.batch_progress/*",
            "*/val_loop.batch_progress/*",
            "*/test_loop/batch_progress/*",
            "*/validate_loop/batch_progress/*",
        ),
        _COUNTERS,
    ),
    *_several(
        "*",
        (
            "*fit_loop/epoch_loop.batch_progress/*/ready",
            "*fit_loop/epoch_loop.batch_progress/*/started",
            "*fit_loop/epoch_loop.batch_progress/*/completed",
            "*fit_loop/epoch_loop.batch_progress/is_last_batch",
            "*fit_loop/epoch_loop.state_dict/_batches_that_stepped",
            "*fit_loop/epoch_progress/*",
        ),
        _TRAINED,
    ),
    Difference("*", "*fit_loop/epoch_loop.batch_progress/current/processed", _BETWEEN),
    *_several(
        "checkpoint_triggers",
        ("trace/*", "facts/steps, best.*"),
        _DEFERRED,
    ),
    Difference(
        "checkpoint_monitor",
        "facts/missing, steps/raises",
        "A monitor that nobody logs is an error for every trigger, not only for those at epoch ends.",
    ),
    Difference(
        "resume_mismatch", "facts/weights only, fit/raises", "A file without training state is a CheckpointError."
    ),
    Difference(
        "load_from_checkpoint", "facts/*/more", "Arguments taken by **kwargs are kept as hyper-parameters, too."
    ),
    *_several(
        "resume_at_epoch_end",
        ("facts/by steps.counters/*", "facts/by steps.csv/rows/*/step"),
        "A resume between epochs with `max_steps` goes on with the next epoch and logger step; Lightning skips one.",
    ),
    # the rest
    Difference("csv_logger", "facts/by hand/rows/*/step", "Rows without a step are counted through, not per flush."),
    Difference("log_step_axis", "facts/csv/rows/*/step", "Rows without a step are counted through, not per flush."),
    Difference("warnings_given", "facts/shuffled validation/*", "Shuffled validation data are warned about always."),
    Difference(
        "hook_order_failure",
        "facts/train.KeyboardInterrupt.counters/stage",
        "After Ctrl-C no stage is running, as after any other exception.",
    ),
)
