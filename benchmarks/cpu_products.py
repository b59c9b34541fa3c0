"""A linear layer and its gradients on a CPU: torch's own product against the models' (oneDNN's).

python benchmarks/cpu_products.py > products.json
"""

import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bayesrnn.models import linear as ours

SIZES = {  # rows, units in, units out
    "softmax, medium": (700, 650, 10_000),
    "softmax, large": (700, 1500, 10_000),
    "softmax of the demo": (700, 200, 5_000),
    "softmax, one stream": (35, 650, 10_000),
    "a masked LSTM's step": (20, 650, 2_600),
    "MNIST, 800 units": (128, 800, 800),
    "at the threshold": (100, 280, 300),
    "labels of speech": (700, 128, 60),
    "one row": (1, 1500, 10_000),
}
TURNS = 15


def main() -> None:
    torch.manual_seed(1)
    ours.SMALLEST, ours.FEWEST_ROWS = 0, 0  # oneDNN for all, so that the limits show
    found = {}
    for name, (rows, inside, out) in SIZES.items():
        x, weight, bias = torch.randn(rows, inside), torch.randn(out, inside), torch.randn(out)
        along = torch.randn(rows, out)
        given = [t.requires_grad_() for t in (x, weight, bias)]

        def both(layer: Callable[..., torch.Tensor]) -> float:
            began = time.perf_counter()
            torch.autograd.grad(layer(*given), given, along)  # noqa: B023
            return 1000 * (time.perf_counter() - began)

        taken = [(both(F.linear), both(ours.linear)) for _ in range(TURNS + 2)][2:]
        mkl, onednn = (statistics.median(each) for each in zip(*taken, strict=True))
        found[name] = {
            "sizes": [rows, inside, out],
            "torch_ms": round(mkl, 3),
            "onednn_ms": round(onednn, 3),
            "times_as_fast": round(mkl / onednn, 2),
        }
    capability = torch.backends.cpu.get_cpu_capability()
    print(json.dumps({"threads": torch.get_num_threads(), "cpu": capability, **found}, indent=1))


if __name__ == "__main__":
    main()
