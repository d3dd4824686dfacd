"""The page that goes with an exported model: what it is, from what, and how good it was found."""

from pathlib import Path
from typing import Any

from nanofit.data.tokenizer import VOCABULARY_SIZE
from nanofit.report.history import History, Record, number_in
from nanofit.settings.config import sound
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import duration, redacted

_HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- nanofit
---

# {name}

A GPT trained with nanofit. It continues text; it was not taught to follow instructions.

{figures}
"""
_COMMAND = """
## How it was trained

```sh
{command}
```
"""
_USE = """
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})
model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
prompt = tokenizer("The river", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50, do_sample=True)[0]))
```
"""
_USE_WITHOUT_TOKENIZER = """
## Use

Its tokens are not GPT-2's, so there is no tokenizer here: give it the ids it was trained on.

```python
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
print(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=10))
```
"""
_OWN_CODE = """
The architecture is not one of transformers' own: `modeling_nanofit.py`, which it runs by
`trust_remote_code`, is the whole of it.
"""
_LICENCE = """
## Licence

Not stated yet. Whoever publishes this model says here, and as `license:` at the top, what may be
done with it.
"""


def model_card(
    name: str,
    shape: GPTConfig,
    saved: dict[str, Any],
    history: History | None,
    *,
    dtype: str,
) -> str:
    """In Markdown, as Hugging Face shows it; what is not known of the run is left out."""
    step = saved.get("iter_num", 0)
    launch = _launch(history, step)
    figures = {
        **_figures_of_model(shape, dtype),
        **_figures_of_run(saved, launch),
        **_figures_of_evaluation(history, step, launch),
    }
    rows = [f"| {label} | {_in_a_cell(value)} |" for label, value in figures.items()]
    trust = ", trust_remote_code=True" if shape.is_modern else ""
    use = _USE if shape.vocab_size == VOCABULARY_SIZE else _USE_WITHOUT_TOKENIZER
    command = launch.get("command")
    return "".join(
        [
            _HEAD.format(name=name, figures="\n".join(["| | |", "|---|---|", *rows])),
            _COMMAND.format(command=_in_a_block(command)) if command else "",
            use.format(name=name, trust=trust),
            _OWN_CODE if shape.is_modern else "",
            _LICENCE,
        ]
    )


def _in_a_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _in_a_block(command: Any) -> str:
    return redacted(" ".join(str(command).split())).replace("```", "...")


def _launch(history: History | None, step: int) -> Record:
    """What is recorded of the launch that made the checkpoint; nothing if there is none."""
    made = [run for run in history.runs if run["step"] < max(step, 1)] if history else []
    return made[-1] if made else {}


def _figures_of_model(shape: GPTConfig, dtype: str) -> dict[str, str]:
    return {
        "architecture": f"`{shape.arch}`: {shape.n_layer} layers, {shape.n_head} heads, "
        f"{shape.n_embd} wide",
        "parameters": f"{shape.parameters:,}, in {dtype}",
        "context": f"{shape.block_size:,} tokens",
        "vocabulary": f"{shape.vocab_size:,} tokens",
    }


def _figures_of_run(saved: dict[str, Any], launch: Record) -> dict[str, str]:
    settings = sound(launch.get("settings") or saved.get("config") or {})
    seen = saved.get("sequences_seen", 0) * saved["model_args"]["block_size"]
    unique = number_in(launch.get("data", {}), "train_tokens")
    machine = launch.get("machine", {})
    figures = {}
    if dataset := settings.get("dataset"):
        held = f", {unique:,} tokens to train on" if unique else ""
        figures["data"] = f"{Path(dataset).name}{held}"
    steps = saved.get("iter_num", 0)
    if seen:
        epochs = f", {seen / unique:.3g} epochs" if unique else ""
        figures["seen in training"] = f"{seen:,} tokens in {steps:,} steps{epochs}"
    if settings.get("init_from") not in (None, "auto", "resume", "scratch"):
        figures["begun from"] = Path(settings["init_from"]).name
    if saved.get("seconds"):
        figures["took"] = duration(saved["seconds"])
    if device := machine.get("device"):
        figures["on"] = f"{device}, {machine.get('precision')}"
    return figures


def _figures_of_evaluation(history: History | None, step: int, launch: Record) -> dict[str, str]:
    found = [one for one in history.evaluations if one["step"] == step] if history else []
    if not found or found[-1]["val_loss"] is None:
        return {}
    sequences = number_in(launch.get("data", {}), "val_sequences")
    over = f", over {sequences:,} sequences" if sequences else ""
    figures = {"validation loss": f"{found[-1]['val_loss']:.4f}{over}"}
    if bits := number_in(found[-1], "bits_per_byte"):
        figures["bits per byte of text"] = f"{bits:.4f}"
    return figures
