"""What the benchmarks read out of Nsight Compute's output."""

from benchmarks.profile import METRICS, parse

NAMES = '"ID","Kernel Name",' + ",".join(f'"{metric}"' for metric in METRICS)


def test_kernels_of_a_profile() -> None:
    text = "\n".join(
        [
            "==PROF== Connected to process 1",
            NAMES,
            '"","","ms","%","%","%","%","register/thread"',
            '"0","void fused::cuda::cross_entropy_bulk_kernel<__half, 0>(fused::CrossEntropyArgs)",'
            '"1,234.5","81.25","60","50","36","40"',
            '"1","void at::native::fill<4>(at::Tensor)","0.002","1","2","3","4","16"',
        ]
    )
    bulk, fill = parse(text)
    assert bulk == {
        "kernel": "cross_entropy_bulk_kernel",
        "us": "1.234e+06",
        "dram": "81.25",
        "issue": "60",
        "xu": "50",
        "warps": "36",
        "registers": "40",
    }
    assert fill["kernel"] == "void at::native::fill"
    assert fill["us"] == "2"


def test_nothing_was_launched() -> None:
    assert parse("==PROF== Disconnected\n") == []
