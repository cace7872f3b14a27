"""Every stage works with every kind of cache: rollouts, states, labels, drafts and heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import datasets
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from distill.config import DistilConfig, FinetuneConfig, InitConfig, Objective
from distill.distillation import distil
from distill.finetune import finetune
from distill.initial import make_initial
from distill.training import save_model
from heads.config import HeadConfig
from heads.train import train_head
from specdata.labels.config import LabelsConfig
from specdata.labels.make import load_labels, make_labels
from specdata.lm_head import find_lm_head
from specdata.models import load_model
from specdata.probability import SamplingConfig, inverse_cdfs, probabilities
from specdata.prompts.config import PromptSet
from specdata.prompts.loading import Prompt
from specdata.rollouts.backend import TransformersBackend, sample_batch
from specdata.rollouts.config import RolloutConfig
from specdata.rollouts.make import make_rollouts
from specdata.saving import copy_tokenizer
from specdata.storage.dataset import load_stored, of_split
from specdata.storage.resume import Settings
from specdata.taps import read_taps
from tests.random_pair import VOCABULARY

WARP = SamplingConfig(0.8, 0, 0.9)
COMMON = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.4,
    "sliding_window": 6,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
