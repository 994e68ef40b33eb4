"""Callbacks that show what a model consists of before it is trained."""

from typing import TYPE_CHECKING, Any

from leyden.base.log import log
from leyden.callbacks.summary_data import Column, format_summary_table, summarize, totals
from leyden.core.callback import Callback

if TYPE_CHECKING:
    from leyden.core.module import LightningModule
    from leyden.trainer.trainer import Trainer

__all__ = ["ModelSummary", "RichModelSummary", "summarize"]


class ModelSummary(Callback):
    """Logs a table of the model's layers when ``fit`` starts, on rank 0.

    Shapes and FLOPs are in it if the module has an ``example_input_array``.

    Args:
        max_depth: Levels of layers to show: 1 for the direct children, -1 for all, 0 for no summary.
        **summarize_kwargs: Go to `summarize`, for subclasses.

    Example:
        ``Trainer(callbacks=ModelSummary(max_depth=2))``
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        self._max_depth = max_depth
        self._summarize_kwargs = summarize_kwargs

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Makes the summary on every rank, because parameters may be spread over them, and shows it on rank 0."""
        if not self._max_depth:
            return
        summary = summarize(pl_module, max_depth=self._max_depth)
        columns = summary._get_summary_data()
        numbers = (summary.total_parameters, summary.trainable_parameters, summary.model_size)
        modes, flops = summary.total_training_modes, summary.total_flops
        if trainer.is_global_zero:
            self.summarize(columns, *numbers, modes, total_flops=flops, **self._summarize_kwargs)

    @staticmethod
    def summarize(
        summary_data: list[Column],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Shows the summary; override to show it otherwise.

        Args:
            summary_data: Title and texts of each column.
            total_parameters: Parameters of the model.
            trainable_parameters: Parameters that get a gradient.
            model_size: Megabytes.
            total_training_modes: Layers in ``"train"`` and ``"eval"`` mode.
            total_flops: Operations of one forward pass; 0: unknown.
            **summarize_kwargs: What the constructor got.
        """
        table = format_summary_table(
            total_parameters, trainable_parameters, model_size, total_training_modes, total_flops, *summary_data
        )
        log.info("\n%s", table)


class RichModelSummary(ModelSummary):
    """Prints the table of `ModelSummary` with colours, by the rich package.

    Args:
        max_depth: Levels of layers to show: 1 for the direct children, -1 for all, 0 for no summary.
        **summarize_kwargs: ``header_style``: style of the titles, ``"bold"`` by default.

    Example:
        ``Trainer(callbacks=RichModelSummary(max_depth=2))``
    """

    @staticmethod
    def summarize(
        summary_data: list[Column],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Prints the summary; arguments as in `ModelSummary.summarize`."""
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(header_style=summarize_kwargs.get("header_style", "bold"))
        for title, _ in summary_data:
            right = title in ("Params", "FLOPs", "In sizes", "Out sizes")
            table.add_column(
                title,
                justify="right" if right else "left",
                style="dim" if title == " " else None,
                no_wrap=title == "Name",
            )
        # A name or shape in square brackets is no style.
        for row in zip(*(texts for _, texts in summary_data), strict=True):
            table.add_row(*map(escape, row))
        lines = Table.grid(padding=(0, 1))
        lines.add_column(style="bold")
        lines.add_column(justify="right")
        numbers = totals(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        for number, what in numbers:
            lines.add_row(what, number)
        console = Console()
        console.print(table)
        console.print(lines)
