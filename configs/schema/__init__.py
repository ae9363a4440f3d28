"""Schema of a run: typed, frozen dataclasses. Recipes compose them; the command line overrides their fields.

The options of an algorithm are defined with it in `specjax`, and imported here so that a recipe needs one import.
"""

from configs.schema.asynchronous import AsynchronousConfig
from configs.schema.before_rl import DistillConfig, WarmupConfig
from configs.schema.data import ArithmeticConfig, DataConfig
from configs.schema.drafts import KINDS, DraftConfig, HeadConfig, LookupConfig, kind_of
from configs.schema.environments import EnvironmentConfig
from configs.schema.functions import LossOptions, RolloutOptions
from configs.schema.hosts import HostsConfig
from configs.schema.model import ModelConfig
from configs.schema.records import CheckpointConfig, EvalConfig, LogConfig, SpeedupConfig
from configs.schema.rewards import LengthConfig, RewardConfig
from configs.schema.run import RunConfig
from configs.schema.teacher import TeacherOptions
from models.config import DecoderConfig
from models.lora import LoraConfig
from specjax.parallel.mesh import MeshConfig
from specjax.sampling import SamplingLaw
from specjax.train.advantage import AdvantageConfig
from specjax.train.draft.schedule import DraftTrainingConfig
from specjax.train.optimizer import OptimizerConfig
from specjax.train.selection import SelectionConfig
from specjax.train.updates import UpdateConfig
