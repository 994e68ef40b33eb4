"""The table of a model's layers and parameters."""

from leyden.callbacks.summary_data import LayerSummary, ModelSummary, get_human_readable_count, summarize

__all__ = ["LayerSummary", "ModelSummary", "get_human_readable_count", "summarize"]
