"""What ``python -m compile_losses info`` tells: versions, devices, kernels and ops."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from compile_losses import implementations, library


def gather() -> dict[str, Any]:
    """The facts, as for ``json.dumps``."""
    from importlib.metadata import version

    return {
        "compile_losses": version("compile_losses"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "gpus": [
            {
                "name": torch.cuda.get_device_name(i),
                "capability": ".".join(map(str, torch.cuda.get_device_capability(i))),
            }
            for i in range(torch.cuda.device_count())
        ],
        "kernels": {
            device: {"loaded": kernels.name} if isinstance(kernels, Path) else {"missing": kernels}
            for device, kernels in library.kernels.items()
        },
        "computed_by": {
            device: str(implementations.choose(torch.device(device))) for device in _devices()
        },
        "cuda_build": library.cuda_build(),
        "ops": library.public_ops(),
    }


def _devices() -> list[str]:
    """The types of devices that this process may use."""
    found = ["cpu"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return found if accelerator is None else [*found, accelerator.type]


def in_words(facts: dict[str, Any]) -> list[str]:
    """The facts as lines of text."""
    lines = [
        f"compile_losses {facts['compile_losses']}",
        f"torch          {facts['torch']} (CUDA {facts['cuda'] or 'not built in'})",
        f"python         {facts['python']} on {facts['platform']}",
        f"cpu            {facts['cpu']['threads']} threads, {facts['cpu']['capability']}",
    ]
    for i, gpu in enumerate(facts["gpus"]):
        lines.append(f"cuda:{i}         {gpu['name']}, capability {gpu['capability']}")
    for device, kernels in facts["kernels"].items():
        name = kernels.get("loaded")
        state = f"loaded from {name}" if name else f"none: {kernels['missing']}"
        lines.append(f"{device + ' kernels':<14} {state}")
    for device, choice in facts["computed_by"].items():
        lines.append(f"{'on ' + device:<14} {choice}")
    return [*lines, "ops            " + ", ".join(facts["ops"])]
