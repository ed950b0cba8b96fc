"""The configuration of a run: its keys (`keys`), and how files and command lines become one (`reading`)."""

from lazyjax.config.keys import (
    DEFAULT_OPTIMIZER,
    SMALLEST_EPSILON,
    CheckpointsConfig,
    Config,
    ConfigError,
    DataConfig,
    DistributedConfig,
    ModelConfig,
    OptimizerConfig,
    PlanConfig,
    RunConfig,
    TrainingConfig,
    digest,
    with_absolute_paths,
)
from lazyjax.config.reading import UniqueKeyLoader, dump_config, load_command_line, load_config

__all__ = [
    "DEFAULT_OPTIMIZER",
    "SMALLEST_EPSILON",
    "CheckpointsConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DistributedConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PlanConfig",
    "RunConfig",
    "TrainingConfig",
    "UniqueKeyLoader",
    "digest",
    "dump_config",
    "load_command_line",
    "load_config",
    "with_absolute_paths",
]
