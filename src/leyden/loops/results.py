"""The table that ``validate`` and ``test`` print."""

from collections.abc import Sequence

__all__ = ["print_results"]


def print_results(results: Sequence[dict[str, float]], stage: str) -> None:
    """Prints metrics as rows and loaders as columns; nothing when nothing was logged.

    Args:
        results: Name to value, one dictionary per loader.
        stage: "validate" or "test", for the heading.
    """
    by_loader = [{name.split("/dataloader_idx_")[0]: value for name, value in result.items()} for result in results]
    names = sorted({name for values in by_loader for name in values})
    if not names:
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column(f"{stage.capitalize()} metric", style="cyan", overflow="fold")
    for index in range(len(by_loader)):
        table.add_column(f"DataLoader {index}", style="magenta", justify="right", overflow="fold")
    for name in names:
        table.add_row(name, *(f"{values[name]}" if name in values else "" for values in by_loader))
    Console().print(table)
