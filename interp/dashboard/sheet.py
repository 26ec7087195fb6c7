"""One layer's weights on one prompt, for all of its units: what the map and the text views show."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from interp.dashboard.mixer_inputs import MixerInputs
from interp.dashboard.prompt import Prompt
from interp.dashboard.quotation import quoted
from interp.errors import DetectionError
from interp.subject import LanguageModelSubject, LayerView, Subject
from models.mixers.reading import Reading

VALUES = ("scored", "signed")
# What a weight is, by normalisation (see models.mixers.reading).
QUANTITIES = {
    "none": "attention",
    "abs_row": "share of |weight|",
    "contribution": "share of contribution",
}


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """Weights [unit dest src] of one layer under one reading.

    Attributes:
        values: "scored" (what prefix matching uses) or "signed" (the implied attention itself).
        quantity: What a weight is, in a few words.
        signed_possible: The reading has a signed form that differs from the scored one.
    """

    prompt: Prompt
    layer: int
    mixer: str
    reading: str
    unit: str
    values: str
    weights: Float[np.ndarray, "unit dest src"]
    quantity: str
    signed_possible: bool

    @property
    def n_units(self) -> int:
        return self.weights.shape[0]

    @property
    def n_bytes(self) -> int:
        return self.weights.nbytes

    def of(self, unit: int) -> Float[np.ndarray, "dest src"]:
        """The weights of one unit.

        Raises:
            DetectionError: there is no such unit.
        """
        if not 0 <= unit < self.n_units:
            raise DetectionError(
                f"layer {self.layer} has {self.unit}s 0..{self.n_units - 1}; asked for {unit}"
            )
        return self.weights[unit]


@torch.no_grad()
def read_sheet(
    subject: Subject,
    prompt: Prompt,
    *,
    layer: int,
    reading: str,
    units: str,
    values: str = "scored",
    inputs: MixerInputs | None = None,
) -> Sheet:
    """Run the model on the prompt up to the layer, and read it.

    Args:
        units: Of Mamba-1 layers; others have heads.
        inputs: Of this subject on this prompt, where some are there already.

    Raises:
        DetectionError: a layer, reading or form of the values that is not there.
    """
    if values not in VALUES:
        raise DetectionError(f"values {quoted(values)}; accepted: {', '.join(VALUES)}")
    if not 0 <= layer < subject.n_layers:
        raise DetectionError(f"layer {layer}: the model has layers 0..{subject.n_layers - 1}")
    inputs = MixerInputs(prompt.ids) if inputs is None else inputs
    found = layer_reading(subject, inputs, prompt, layer=layer, reading=reading, units=units)
    possible = signed_possible(found)
    signed = values == "signed" and possible
    weights = _signed(found) if signed else found.weights()
    return Sheet(
        prompt=prompt,
        layer=layer,
        mixer=subject.mixers[layer],
        reading=found.name,
        unit=found.unit,
        values="signed" if signed else "scored",
        weights=weights[0].float().cpu().numpy(),
        quantity=_signed_quantity(found) if signed else QUANTITIES[found.normalisation],
        signed_possible=possible,
    )


def layer_reading(
    subject: Subject, inputs: MixerInputs, prompt: Prompt, *, layer: int, reading: str, units: str
) -> Reading:
    """The reading of one layer; layers above it are not run where that can be helped."""
    if isinstance(subject, LanguageModelSubject):
        mixer = subject.model.blocks[layer].attn
        x = inputs.at(subject, layer)
        return mixer.read(x, reading, units=units if mixer.kind == "mamba1" else None)
    tokens = torch.tensor([prompt.ids], device=subject.device)
    found: list[Reading] = []

    def look(view: LayerView) -> None:
        if view.layer == layer:
            found.extend(one for one in view.readings if one.name == reading)

    subject.visit(tokens, look)
    if not found:
        raise DetectionError(f"layer {layer} has no reading {quoted(reading)}")
    return found[0]


def signed_possible(reading: Reading) -> bool:
    """Edges of the block reading are vectors, and softmax weights have no sign."""
    return reading.normalisation != "none" and reading.name != "block"


def _signed_quantity(reading: Reading) -> str:
    averaged = reading.entries.d_entry > 1
    return "implied attention, mean of channels" if averaged else "implied attention"


def _signed(reading: Reading) -> Float[Tensor, "batch unit dest src"]:
    """The implied attention as it is; where each channel has its own, their mean over the unit's channels."""
    out = reading.constant.new_zeros(reading.n_batch, reading.n_units, reading.n_seq, reading.n_seq)
    blocks = list(reading.row_blocks(0, reading.n_seq))
    # Padding entries of clusters are zero.
    n_channels = (
        (reading.z_index >= 0).sum(-1) if reading.entries.d_entry > 1 else torch.ones(reading.n_units)
    )
    for (start, stop), entry in zip(blocks, reading.entries.walk(blocks), strict=True):
        total = entry.sum(-1).permute(0, 3, 1, 2)
        out[:, :, start:stop, :stop] = total / n_channels.to(total)[:, None, None]
    return out
