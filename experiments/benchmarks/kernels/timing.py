"""Times of one operator on a GPU: device time from CUDA-graph replays, host time of an eager call, peak
memory."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds, except peak_mb (memory above the inputs, of a forward and backward)."""

    forward: float
    both: float
    host: float
    cold: float
    peak_mb: float


def device_time(run: Callable[[], object], repeats: int = 20) -> tuple[float, bool]:
    """(median µs of one replay of a captured graph, True), or (of an eager call between events, False)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    captured = True
    try:
        with torch.cuda.graph(graph):
            run()
        once = graph.replay
    except RuntimeError:
        torch.cuda.synchronize()
        once, captured = run, False
    for _ in range(3):
        once()
    events = [(torch.cuda.Event(enable_timing=True),
        torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        # Keep the device busy while the host enqueues, so that its delay is not counted.
        torch.cuda._sleep(400_000)
        start.record()
        once()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1e3 for a, b in events), captured


def host_time(run: Callable[[], object], repeats: int = 10) -> float:
    """Median µs that the host needs to enqueue one call."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def measure(operator: Callable[..., Tensor], inputs: list[Tensor]) -> Timing:
    """Time an operator's forward, and forward with the gradient of every input; the first call is the cold
    start."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    torch.cuda.synchronize()
    start = time.perf_counter()
    cotangent = torch.randn_like(operator(*inputs))

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(operator(*inputs), inputs, cotangent)

    def forward() -> Tensor:
        with torch.no_grad():
            return operator(*inputs)

    both()
    torch.cuda.synchronize()
    cold = (time.perf_counter() - start) * 1e6
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 1e6
    host = host_time(both)
    return Timing(
        forward=device_time(forward)[0], both=device_time(both)[0], host=host, cold=cold, peak_mb=peak
    )
