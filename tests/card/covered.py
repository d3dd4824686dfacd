"""Whether the tests here have executed every line of CUDA in the product.

    python tests/card/covered.py .venv-cuda/coverage

That is every line of device.py, memory.py and nvml.py in nanofit/machine but those for devices that
tell nothing of their memory, as Apple's, and every expression elsewhere that asks for CUDA: as the
condition of a statement with both of its outcomes, else as a line that was executed, for of what is
within a line coverage does not tell. Exits with 1 if any is missing.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
MACHINE = [PROJECT / "nanofit/machine" / name for name in ("device.py", "memory.py", "nvml.py")]


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
    asked = mentioned = 0
    for path in sorted([*PROJECT.glob("*.py"), *PROJECT.glob("nanofit/**/*.py")]):
        if path not in MACHINE:
            file, (conditions, others) = _of(files, path), asking(path.read_text())
            asked += len(conditions)
            mentioned += len(others)
            lines = [line for line in conditions if not _is_covered(file, line)]
            lines += [line for line in others if line not in file["executed_lines"]]
            missing += [f"{path.name}:{line}" for line in lines]
    print(f"elsewhere: {asked} conditions ask for CUDA, both outcomes; {mentioned} other lines")
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


def asking(source: str) -> tuple[list[int], list[int]]:
    """The lines on which a statement depends on CUDA, and those on which only a value does."""
    tree = ast.parse(source)
    statements = [node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.While)]
    expressions = [
        node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.BoolOp | ast.IfExp)
    ]
    conditions = {node.lineno for node in statements if _asks(node)}
    within = {line for node in statements for line in range(node.lineno, node.end_lineno + 1)}
    others = {node.lineno for node in expressions if _asks(node)} - within
    return sorted(conditions), sorted(others)


def _asks(expression: ast.expr) -> bool:
    """Whether a value depends on a device being CUDA's."""
    asked = expression.test if isinstance(expression, ast.IfExp) else expression
    return any(
        (isinstance(node, ast.Constant) and node.value in ("cuda", "nccl"))
        or (isinstance(node, ast.Attribute) and node.attr == "is_cuda")
        or ast.unparse(node).startswith("torch.cuda.")
        for node in ast.walk(asked)
    )


def _is_covered(file: dict, line: int) -> bool:
    if line not in file["executed_lines"]:
        return False
    return all(origin != line for origin, _ in file["missing_branches"])


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
