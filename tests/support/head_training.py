"""What several files of tests use of `test_head_training`."""

from heads.config import HeadConfig

# Rows in threes are not a divisor of the batch of 16: rows must be filled up.
COMMON = {"depth": 1, "batch_size": 16, "learning_rate": 3e-3, "epochs": 2, "save_steps": 3}


IMMEDIATE = HeadConfig.model_validate(
    {**COMMON, "kind": "immediate", "width": 16, "micro_batch_size": 8}
)
