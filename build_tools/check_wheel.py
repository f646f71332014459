"""``python -m build_tools.check_wheel WHEEL`` checks a wheel by its file alone.

build_tools.test_wheel runs the tests with it.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).parent.parent
PLATFORM = "manylinux_2_28_x86_64"
#: Of a wheel without kernels, for any platform.
ANY_NAME = re.compile(r"compile_losses-[0-9a-z.]+-py3-none-any\.whl")
NAME = re.compile(rf"compile_losses-[0-9a-z.]+-cp310-abi3-{PLATFORM}\.whl")
#: Libraries that torch has loaded before a wheel's libraries are loaded. With libtorch.so, a wheel
#: built beside a torch without CUDA also finds torch's CUDA library.
TORCH = {"libtorch.so", "libtorch_cpu.so", "libcudart.so.13"}
SYSTEM = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
#: Weak symbols that compilers refer to. Most systems do not define them.
OPTIONAL_SYMBOLS = {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable"}
VERSIONED = re.compile(r"(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+|libcudart\.so\.13")
MEGABYTES = 60
FILES = re.compile(
    r"compile_losses/([a-z0-9_]+/)*[A-Za-z0-9_]+\.py"
    r"|_compile_losses_autoload\.py"
    r"|compile_losses/(py\.typed|kernels\.json|_cuda\.so|_cpu_(default|avx2|avx512)\.so)"
    r"|compile_losses-[^/]+\.dist-info/(METADATA|WHEEL|RECORD|top_level\.txt|entry_points\.txt"
    r"|licenses/LICENSE)"
)


def problems(wheel: Path) -> Iterator[str]:
    """Yields a message for each problem of a wheel."""
    is_any = ANY_NAME.fullmatch(wheel.name) is not None
    if not is_any and not NAME.fullmatch(wheel.name):
        yield f"{wheel.name}: expected a name such as {NAME.pattern} or {ANY_NAME.pattern}"
    size = wheel.stat().st_size / 1e6
    if size > MEGABYTES:
        yield f"{wheel.name}: {size:.1f} MB, expected at most {MEGABYTES}"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        libraries = [name for name in names if name.endswith(".so")]
        if is_any and libraries:
            yield f"expected no kernels in a wheel for any platform, got {libraries}"
        if not is_any and sum("/_cpu_" in name for name in libraries) != 3:
            yield f"expected CPU kernels for three instruction sets, got {libraries}"
        for name in names:
            if not FILES.fullmatch(name):
                yield f"{name}: nothing that users need"
            content = archive.read(name)
            for place in {str(ROOT), str(Path.home()), sys.prefix, sys.base_prefix}:
                if place.encode() in content:
                    yield f"{name}: holds {place}, of the machine that it was built on"
            if name.endswith(".so"):
                yield from (f"{name}: {what}" for what in problems_of(ELFFile(BytesIO(content))))


def problems_of(library: ELFFile) -> Iterator[str]:
    dynamic = library.get_section_by_name(".dynamic")
    for tag in dynamic.iter_tags():
        if tag.entry.d_tag == "DT_NEEDED" and tag.needed not in TORCH | SYSTEM:
            yield f"needs {tag.needed}"
        if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
            yield f"has a {tag.entry.d_tag}"
    for section in library.iter_sections():
        if section.name.startswith(".debug") or section.name == ".symtab":
            yield f"has a section {section.name}"
    known = stable_abi()
    for symbol, version in symbols(library):
        if symbol["st_shndx"] != "SHN_UNDEF":
            yield f"exports {symbol.name}"
        elif version is not None:
            if not VERSIONED.fullmatch(version):
                yield f"takes {symbol.name} of {version}"
        elif symbol.name not in known | OPTIONAL_SYMBOLS:
            yield f"takes {symbol.name}, which is not in libtorch's stable ABI"


def stable_abi() -> set[str]:
    """The functions of libtorch's stable ABI, from the headers that torch installs."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    headers = Path(torch.origin).parent / "include/torch/csrc"
    names: set[str] = set()
    for header in ("stable/c/shim.h", "inductor/aoti_torch/c/shim.h"):
        names |= set(re.findall(r"\b(?:aoti_)?torch_\w+", (headers / header).read_text()))
    return names


def symbols(library: ELFFile) -> Iterator[tuple[object, str | None]]:
    """The dynamic symbols, each with the version or file that must provide it."""
    versions = {}
    needed = library.get_section_by_name(".gnu.version_r")
    for file, entries in needed.iter_versions():
        for entry in entries:
            # NVIDIA's runtime has a version of the name of its file.
            versions[entry["vna_other"]] = entry.name if "_" in entry.name else file.name
    indices = library.get_section_by_name(".gnu.version")
    for i, symbol in enumerate(library.get_section_by_name(".dynsym").iter_symbols()):
        if symbol.name:
            index = indices.get_symbol(i)["ndx"]
            yield symbol, versions.get(index) if isinstance(index, int) else None


def main(arguments: list[str]) -> int:
    (wheel,) = map(Path, arguments)
    found = list(problems(wheel))
    print(*found, sep="\n", end="\n" if found else "")
    # `make wheel` compares auditwheel's findings on symbol versions with the wheel's name.
    # abi3audit checks that only stable symbols of Python are used.
    audit = subprocess.run([sys.executable, "-m", "abi3audit", "--strict", "--summary", str(wheel)])
    size = wheel.stat().st_size / 1e6
    print(f"{wheel.name}: {size:.1f} MB, {len(found)} problems, abi3audit {audit.returncode}")
    return 1 if found or audit.returncode else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
