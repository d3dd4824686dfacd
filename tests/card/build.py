"""Build the card's libraries for the CUDA build of torch that a Python has.

    python tests/card/build.py .venv-cuda/bin/python build/card

torch's libraries find NVIDIA's by name, so ours bear the same names and are preloaded.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
GCC = ("gcc", "-O1", "-g", "-fPIC", "-w")
NVML_NOT_SUPPORTED = 3
PRELOADED = (
    "libcuda.so.1",
    "libcudart.so.13",
    "libcublasLt.so.13",
    "libcublas.so.13",
    "libnvidia-ml.so.1",
    "libnccl.so.2",
)


def build(python: Path, folder: Path) -> Path:
    """Make the libraries, unless they are there already; return the folder they are in.

    Each version of the sources has a folder of its own, whole or absent, as others may be building.
    """
    code = b"".join(file.read_bytes() for file in sorted(SOURCES.glob("*.[ch]")))
    digest = hashlib.sha256(code + Path(__file__).read_bytes()).hexdigest()
    finished = folder.resolve() / digest[:12]
    if not finished.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.resolve()))
        _Builder(_site_packages(python), unfinished).build()
        with suppress(OSError):  # somebody else was quicker
            unfinished.rename(finished)
    return finished


def preload(folder: Path) -> dict[str, str]:
    """What puts the libraries of a folder in front of NVIDIA's."""
    preloaded = ":".join(str(folder / name) for name in PRELOADED)
    return {"LD_PRELOAD": preloaded, "TRITON_LIBCUDA_PATH": str(folder)}


class _Builder:
    def __init__(self, site: Path, folder: Path):
        self._site = site
        self._cuda, self._nccl = site / "nvidia/cu13", site / "nvidia/nccl/lib/libnccl.so.2"
        self._folder = folder
        (folder / "nv").mkdir(exist_ok=True)
        (folder / "nv/target").write_text("")  # cuda_fp16.h includes it for device code
        triton = site / "triton/backends/nvidia/include"
        self._includes = [f"-I{path}" for path in (folder, self._cuda / "include", triton)]

    def build(self) -> None:
        objects = [self._compile(f"{name}.c") for name in ("card", "runtime", "driver", "blas")]
        objects.append(self._stubs("cuda", self._names_of_cuda(), objects))
        self._link("libcuda.so.1", *objects, "-ldl", "-lpthread")
        (self._folder / "libcuda.so").unlink(missing_ok=True)
        (self._folder / "libcuda.so").symlink_to("libcuda.so.1")
        nvml = self._compile("nvml.c")
        stubs = self._stubs("nvml", self._names_of_nvml(), [nvml], result=NVML_NOT_SUPPORTED)
        self._link("libnvidia-ml.so.1", nvml, stubs, *self._with_card())
        nccl = self._compile("nccl.c")
        stubs = self._stubs("nccl", _exported(self._nccl), [nccl])
        self._link("libnccl.so.2", nccl, stubs, *self._with_card())
        for name in set(PRELOADED) - {"libcuda.so.1", "libnvidia-ml.so.1", "libnccl.so.2"}:
            self._link(name)  # empty: what it should hold is in libcuda

    def _names_of_cuda(self) -> set[str]:
        names = set()
        for name in ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13"):
            names |= _exported(self._cuda / "lib" / name)
        header = (self._cuda / "include/cuda.h").read_text()
        names |= set(re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(", header))
        names |= set(re.findall(r"#\s*define\s+cu[A-Z]\w+\s+(cu[A-Z]\w+_v\d)\b", header))
        return names

    def _names_of_nvml(self) -> set[str]:
        """Those that nvidia-ml-py asks for: no package has its library or its header."""
        text = (self._site / "pynvml.py").read_text()
        return set(re.findall(r"_nvmlGetFunctionPointer\(\"(nvml\w+)\"\)", text))

    def _stubs(self, kind: str, names: set[str], objects: list[Path], result: int = 0) -> Path:
        """A function for every name that nobody has written: it tells of itself."""
        written = set().union(*map(_defined, objects))
        pattern = re.compile(r"(__)?cu(da|blas)?[A-Z]|nccl[A-Z]|nvml[A-Z]")
        lines = [
            '#include "card.h"',
            "#define STUB(name) int name(void) { \\",
            f'  static int told; if (!told++) card_unknown("stub", #name); return {result}; }}',
            *(f"STUB({name})" for name in sorted(names - written) if pattern.match(name)),
        ]
        source = self._folder / f"{kind}_stubs.c"
        source.write_text("\n".join(lines) + "\n")
        return self._compile(source)

    def _compile(self, source: str | Path) -> Path:
        result = self._folder / Path(source).with_suffix(".o").name
        _run(*GCC, f"-I{SOURCES}", *self._includes, "-c", SOURCES / source, "-o", result)
        return result

    def _link(self, name: str, *parts: str | Path) -> None:
        _run("gcc", "-shared", f"-Wl,-soname,{name}", *parts, "-o", self._folder / name)

    def _with_card(self) -> list[str]:
        return [f"-L{self._folder}", "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN"]


def _site_packages(python: Path) -> Path:
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(_run(python, "-c", ask).strip())


def _exported(library: Path) -> set[str]:
    return _functions(_run("nm", "-D", "--defined-only", library))


def _defined(object_file: Path) -> set[str]:
    return _functions(_run("nm", "--defined-only", object_file))


def _functions(listing: str) -> set[str]:
    rows = [line.split() for line in listing.splitlines()]
    return {row[-1].split("@")[0] for row in rows if len(row) > 1 and row[-2] in "TtWi"}


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), Path(sys.argv[2])))
