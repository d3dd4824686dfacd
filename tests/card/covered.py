"""Whether the tests here have executed every line of CUDA in the product.

    python tests/card/covered.py .venv-cuda/coverage

That is every line of nanofit/machine/device.py and memory.py but those for devices that tell
nothing of their memory, as Apple's, and every condition elsewhere that asks for CUDA, with both of
its outcomes. Exits with 1 if any is missing.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
MACHINE = [PROJECT / "nanofit/machine" / name for name in ("device.py", "memory.py")]


def main(folder: Path) -> None:
    coverage = [sys.executable, "-m", "coverage"]
    options = [f"--data-file={folder / 'data'}"]
    os.environ["CARD_PROJECT"] = str(PROJECT)
    options.append(f"--rcfile={PROJECT / 'tests/card/coverage.ini'}")
    subprocess.run([*coverage, "combine", "-q", "--keep", *options], cwd=PROJECT, check=True)
    report = folder / "report.json"
    subprocess.run([*coverage, "json", "-q", *options, "-o", report], cwd=PROJECT, check=True)
    files = json.loads(report.read_text())["files"]
    missing = []
    for path in MACHINE:
        lines = set(_of(files, path)["missing_lines"]) - _lines_of_other_devices(path)
        count = len(_of(files, path)["executed_lines"])
        missing += [f"{path.name}:{line}" for line in sorted(lines)]
        print(f"machine/{path.name}: {count} of {count + len(lines)} lines executed")
    asked = 0
    for path in sorted([*PROJECT.glob("*.py"), *PROJECT.glob("nanofit/**/*.py")]):
        if path not in MACHINE:
            for line in _conditions(path):
                asked += 1
                missing += [f"{path.name}:{line}"] * (not _is_covered(_of(files, path), line))
    print(f"elsewhere: {asked} conditions ask for CUDA")
    print("not covered: " + ", ".join(missing) if missing else "all covered, 100 %")
    sys.exit(bool(missing))


def _of(files: dict, path: Path) -> dict:
    nothing = {"missing_lines": [], "executed_lines": [], "missing_branches": []}
    return files.get(str(path), files.get(str(path.relative_to(PROJECT)), nothing))


def _lines_of_other_devices(path: Path) -> set[int]:
    """Those of the memory of any device, and of Apple's GPU."""
    source = path.read_text()
    lines = {number for number, line in enumerate(source.splitlines(), 1) if "mps" in line}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "DeviceMemory":
            lines.update(range(node.lineno, node.end_lineno + 1))
    return lines


def _conditions(path: Path) -> list[int]:
    """The lines of a file on which something depends on CUDA."""
    source = path.read_text()
    tests = [
        node.test for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If | ast.IfExp)
    ]
    words = ('"cuda"', "torch.cuda", '"nccl"')
    segments = {test.lineno: ast.get_source_segment(source, test) for test in tests}
    return [line for line, text in segments.items() if any(word in text for word in words)]


def _is_covered(file: dict, line: int) -> bool:
    if line not in file["executed_lines"]:
        return False
    return all(origin != line for origin, _ in file["missing_branches"])


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
