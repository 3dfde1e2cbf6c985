"""Graft's nodes: a schema and a call each. The engine is in `training/`."""

from __future__ import annotations

from .base_model import LoadBaseModel
from .dataset import (
    DatasetFromImages,
    EncodeDataset,
    JoinDatasets,
    LoadDataset,
    PreviewDataset,
    SplitDataset,
)
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
from .output import LoadTrainingState, SaveLora, SaveTrainingState
from .pictures import CheckpointGrid, LossPlot, SamplePromptsNode
from .settings import (
    CheckpointSettings,
    DatasetSettingsNode,
    MemorySettings,
    ObjectiveSettings,
    OptimizerSettings,
    ValidationSettings,
)
from .tools import MemoryPlan, ValidationLoss
from .train import TrainSteps

ALL_NODES = [
    LoadBaseModel, LoadDataset, DatasetFromImages, DatasetSettingsNode, JoinDatasets, PreviewDataset,
    EncodeDataset, SplitDataset, BuildLora, LoraSettings, OptimizerSettings, ObjectiveSettings,
    MemorySettings, ValidationSettings, CheckpointSettings, SamplePromptsNode, MemoryPlan, TrainingJob,
    TrainSteps, LossPlot, CheckpointGrid, ValidationLoss, SaveLora, SaveTrainingState, LoadTrainingState,
    MergeLora, UnmergeLora, MergeCheckpoint, ExtractLora, ResizeLora, ConvertLora, InspectLora,
]  # fmt: skip
"""In workflow order."""
