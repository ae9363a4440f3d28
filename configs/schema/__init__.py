"""The schema of a run: typed, frozen dataclasses that recipes compose and the command line overrides.

The options of an algorithm stand beside it in `specjax`; they are listed here too, so that a recipe has one import.
"""

from configs.schema.before_rl import DistillConfig, WarmupConfig
from configs.schema.data import ArithmeticConfig, DataConfig
from configs.schema.functions import LossOptions, RolloutOptions
from configs.schema.networks import DraftConfig, HeadConfig, LookupConfig, ModelConfig
from configs.schema.records import CheckpointConfig, EvalConfig, LogConfig, SpeedupConfig
from configs.schema.rewards import LengthConfig, RewardConfig
from configs.schema.run import RunConfig
from models.config import DecoderConfig
from specjax.parallel.mesh import MeshConfig
from specjax.sampling import SamplingLaw
from specjax.train.adaptation import DraftTrainingConfig
from specjax.train.advantage import AdvantageConfig
from specjax.train.optimizer import OptimizerConfig
from specjax.train.selection import SelectionConfig
from specjax.train.updates import UpdateConfig
