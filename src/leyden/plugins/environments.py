"""Where the processes of a distributed run come from, under the path that Lightning has for it."""

from leyden.dist.env import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    TorchElasticEnvironment,
)
from leyden.dist.schedulers import LSFEnvironment, MPIEnvironment, SLURMEnvironment

__all__ = [
    "ClusterEnvironment",
    "KubeflowEnvironment",
    "LSFEnvironment",
    "LightningEnvironment",
    "MPIEnvironment",
    "SLURMEnvironment",
    "TorchElasticEnvironment",
]
