"""`make bench`: the CPU benchmarks one after the other. Each writes its own file in `results/`."""

from experiments.benchmarks import detection, generation, training


def main() -> int:
    """Run all of them; the exit status is 0 when all ended well."""
    return max(benchmark.main([]) or 0 for benchmark in (training, detection, generation))


if __name__ == "__main__":
    raise SystemExit(main())
