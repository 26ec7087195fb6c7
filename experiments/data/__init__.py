"""What models are trained on: five synthetic tasks and real text, one interface.

A task gives `batch(step)` for training and `held_out(n)` for evaluation. Both are pure functions of the
seeds, so that training resumes exactly from a step number: no generator state is kept.
"""

from experiments.data.batch import Batch, Task
from experiments.data.config import DataConfig

__all__ = ["Batch", "DataConfig", "Task", "synthetic_task"]


def synthetic_task(config: DataConfig, *, batch: int, data_seed: int, eval_seed: int) -> Task:
    """The task of a synthetic data configuration (text: `experiments.data.text.TextTask`).

    Raises:
        ValueError: `config` is of text.
    """
    from experiments.data.iid import sample_iid
    from experiments.data.markov import sample_markov
    from experiments.data.periodic import sample_periodic
    from experiments.data.recall import sample_recall
    from experiments.data.segment_copy import sample_segment_copy

    samplers = {
        "periodic": sample_periodic,
        "segment_copy": sample_segment_copy,
        "markov": sample_markov,
        "recall": sample_recall,
        "iid": sample_iid,
    }
    if config.kind not in samplers:
        raise ValueError(f"data of kind {config.kind!r} is not synthetic; accepted: {', '.join(samplers)}")
    return Task(config, samplers[config.kind], batch=batch, data_seed=data_seed, eval_seed=eval_seed)
