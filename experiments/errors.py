"""What can go wrong while training, apart from bad configurations (ConfigError) and checkpoints
(CheckpointError).
"""


class TrainingError(RuntimeError):
    """Training cannot start or go on; the message says why and what to change."""
