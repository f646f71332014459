"""Time of recognition in compiling a large graph: ``python -m benchmarks.recognition``."""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F

from compile_losses.recognize import rewrite_graph


def model(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Two hundred small transformer layers, about 2,200 nodes, with three losses."""
    for _ in range(200):
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        scores = (normal @ normal.transpose(-1, -2)).softmax(-1)
        x = x + F.silu(scores @ normal)
    logits = x.view(-1, x.size(-1))
    log_p = logits.log_softmax(-1)
    written = -log_p.gather(1, target[:, None]).mean() + (x - 1).square().mean()
    return F.cross_entropy(logits, target) + written


def main() -> None:
    times, sizes = [], []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> object:
        for _ in range(7):
            graph = torch.fx.Graph()
            graph.output(graph.graph_copy(gm.graph, {}))
            start = time.perf_counter()
            rewrite_graph(graph, verify=False)
            times.append((time.perf_counter() - start) * 1e3)
            sizes.append(len(gm.graph.nodes))
        return gm.forward

    inputs = torch.randn(2, 4, 8), torch.randint(8, (8,))
    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    print(f"{sizes[0]} nodes: {statistics.median(times):.1f} ms, at least {min(times):.1f} ms")


if __name__ == "__main__":
    main()
