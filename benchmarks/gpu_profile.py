"""The kernels of one replayed training step on a GPU, in the order they start.

python benchmarks/gpu_profile.py plain|bayesian|sharpened
"""

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from bayesrnn import bench
from bayesrnn.engine import WARM_UP, products_in

STEPS = 5
CASES = {"plain": bench.PLAIN, "bayesian": bench.BAYESIAN, "sharpened": bench.SHARPENED}


def main() -> None:
    with products_in("tf32"):
        batch = bench._batch("medium", torch.device("cuda"))
        step = bench._ours("medium", batch, CASES[sys.argv[1]])
        for _ in range(WARM_UP + 3):
            step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(STEPS):
                step()
            torch.cuda.synchronize()
    on_gpu = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    on_gpu.sort(key=lambda e: e.time_range.start)
    last = on_gpu[-(len(on_gpu) // STEPS) :]
    start = last[0].time_range.start
    for event in last:
        begin, end = event.time_range.start - start, event.time_range.end - start
        print(f"{begin:9.1f} {end:9.1f} {end - begin:7.1f} us  {event.name[:90]}")


if __name__ == "__main__":
    main()
