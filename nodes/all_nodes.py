"""ALL_NODES: every node that ComfyUI gets from Graft."""

from __future__ import annotations

from .base_model import LoadBaseModel
from .caption_dataset import CaptionDataset, DatasetImages
from .checkpoint_settings import CheckpointSettings
from .dataset import (
    DatasetFromImages,
    EncodeDataset,
    JoinDatasets,
    LoadDataset,
    PreviewDataset,
    SplitDataset,
)
from .dataset_from_latents import DatasetFromLatents
from .dataset_settings import DatasetSettingsNode
from .job import TrainingJob
from .lora import BuildLora
from .lora_settings import LoraSettings
from .lora_tools import (
    ConvertLora,
    ExtractLora,
    InspectLora,
    MergeCheckpoint,
    MergeLora,
    ResizeLora,
    UnmergeLora,
)
from .measure import DatasetReport, MemoryPlan, ValidationLoss
from .memory_settings import MemorySettings
from .objective_settings import ObjectiveSettings
from .optimizer_settings import OptimizerSettingsNode
from .plots import CheckpointGrid, LossPlot
from .sample_prompts import SamplePromptsNode
from .save_and_load import LoadTrainingState, SaveLora, SaveTrainingState
from .slider import SliderFromPairs, SliderFromWords
from .train import TrainSteps
from .validation_settings import ValidationSettings
from .video_dataset import DatasetFromVideos

ALL_NODES = [
    LoadBaseModel,
    LoadDataset,
    DatasetFromImages,
    DatasetFromLatents,
    DatasetFromVideos,
    DatasetSettingsNode,
    JoinDatasets,
    CaptionDataset,
    DatasetImages,
    SliderFromWords,
    SliderFromPairs,
    PreviewDataset,
    EncodeDataset,
    SplitDataset,
    BuildLora,
    LoraSettings,
    OptimizerSettingsNode,
    ObjectiveSettings,
    MemorySettings,
    ValidationSettings,
    CheckpointSettings,
    SamplePromptsNode,
    MemoryPlan,
    TrainingJob,
    TrainSteps,
    LossPlot,
    CheckpointGrid,
    ValidationLoss,
    DatasetReport,
    SaveLora,
    SaveTrainingState,
    LoadTrainingState,
    MergeLora,
    UnmergeLora,
    MergeCheckpoint,
    ExtractLora,
    ResizeLora,
    ConvertLora,
    InspectLora,
]
"""In workflow order."""
