"""Small tools that scripts import from Lightning, under the paths that it has for them."""

from leyden.base.registry import lazy_exports

_LOG = "leyden.base.log"
_MODULES = "leyden.base.modules"

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "AttributeDict": "leyden.core.hparams",
        "CombinedLoader": "leyden.loops.combined",
        "GradClipAlgorithmType": "leyden.utilities.enums",
        "LightningEnum": "leyden.utilities.enums",
        "disable_possible_user_warnings": "leyden.utilities.warnings",
        "find_shared_parameters": _MODULES,
        "grad_norm": _MODULES,
        "is_picklable": "leyden.utilities.parsing",
        "measure_flops": _MODULES,
        "move_data_to_device": "leyden.utilities.apply_func",
        "rank_zero_debug": _LOG,
        "rank_zero_deprecation": _LOG,
        "rank_zero_info": _LOG,
        "rank_zero_only": _LOG,
        "rank_zero_warn": _LOG,
        "set_shared_parameters": _MODULES,
        "suggested_max_num_workers": "leyden.loops.data",
    },
    submodules=(
        "apply_func",
        "combined_loader",
        "compile",
        "data",
        "enums",
        "exceptions",
        "grads",
        "memory",
        "model_helpers",
        "model_summary",
        "parameter_tying",
        "parsing",
        "rank_zero",
        "seed",
        "types",
        "warnings",
    ),
)
