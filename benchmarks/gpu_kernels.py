"""What the parts of a step cost on a GPU, each replayed as a CUDA graph: ms as one JSON object.

python benchmarks/gpu_kernels.py > kernels.json
"""

import json
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from bayesrnn.bayes import Gaussian
from bayesrnn.bayes.passes import draw_pass
from bayesrnn.engine import compiled, products_in

T, B, V, WEIGHTS = 35, 20, 10_000, 19_766_240


def ms(function: Callable[[], object], count: int = 30) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    taken = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / count)
    return round(statistics.median(taken), 4)


def layers(found: dict[str, float]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for size in (650, 652, 656, 672, 1500, 1504):
            rnn = nn.LSTM(size, size, 2).to("cuda", dtype)
            x = torch.randn(T, B, size, device="cuda", dtype=dtype, requires_grad=True)
            wanted = [x, *rnn.parameters()]

            def both(rnn: nn.LSTM = rnn, x: torch.Tensor = x, wanted: list = wanted) -> None:  # type: ignore[type-arg]
                y = rnn(x)[0]
                torch.autograd.grad(y, wanted, y.detach())

            found[f"lstm fwd+bwd {name} {size}"] = ms(both)
        for size in (650, 656):
            w = torch.randn(V, size, device="cuda", dtype=dtype, requires_grad=True)
            h = torch.randn(T * B, size, device="cuda", dtype=dtype, requires_grad=True)
            y = torch.randint(V, (T * B,), device="cuda")

            def loss(
                w: torch.Tensor = w, h: torch.Tensor = h, y: torch.Tensor = y
            ) -> tuple[torch.Tensor, ...]:
                z = F.cross_entropy(F.linear(h, w).float(), y, reduction="sum")
                return torch.autograd.grad(z, [h, w])

            found[f"softmax {name} {size}"] = ms(loss)


def passes(found: dict[str, float]) -> None:
    loc, rho, eps, out = (torch.randn(V, 650, device="cuda") for _ in range(4))
    posterior, draw = Gaussian((0.046, 0.092)), compiled(draw_pass)
    tensors = {"loc": loc, "rho": rho}
    found["draw 10000x650"] = ms(lambda: draw(posterior, tensors, {"eps": eps}, out))
    noise = torch.empty(WEIGHTS, device="cuda")
    found["normal noise 19.8M"] = ms(lambda: noise.normal_())


def main() -> None:
    found: dict[str, float] = {}
    with products_in("tf32"):
        layers(found)
        passes(found)
    device = torch.cuda.get_device_name()
    print(json.dumps({"hardware": device, "torch": torch.__version__, "ms": found}, indent=1))


if __name__ == "__main__":
    main()
