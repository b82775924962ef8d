# Written by scripts/public.

from paceline.metrics.answers import Answers as Answers
from paceline.data.image.source import ArraySource as ArraySource
from paceline.data.batch import Batch as Batch
from paceline.data.image.decode import BrokenImageError as BrokenImageError
from paceline.metrics.accumulator import Collector as Collector
from paceline.recipe.data import Data as Data
from paceline.plan import DataFacts as DataFacts
from paceline.data.image.dataset import DatasetRequest as DatasetRequest
from paceline.data.image.source import FileSource as FileSource
from paceline.data.image.datasets import ImageDataset as ImageDataset
from paceline.metrics.accumulator import Metric as Metric
from paceline.tasks.task import Model as Model
from paceline.data.pipeline import Pipeline as Pipeline
from paceline.data.pipeline import Placement as Placement
from paceline.data.image.dataset import Probe as Probe
from paceline.data.slices import SampleSlice as SampleSlice
from paceline.data.pipeline import SimplePipeline as SimplePipeline
from paceline.data.image.dataset import StoredImages as StoredImages
from paceline.tasks.task import Task as Task
from paceline.recipe.unused import all_but as all_but
from paceline.plugins.dataset_registry import dataset as dataset
from paceline.data.order import epoch_order as epoch_order
from paceline.data.image.dataset import in_splits as in_splits
from paceline.data.image.sets.digits import read_digits as read_digits
from paceline.checkpoint.weights import read_weights as read_weights
from paceline.data.pipeline import reading_threads as reading_threads
from paceline.data.random_draws import uniforms as uniforms

HOMES: dict[str, str]
