"""Why a model of the zoo is an exception, by its name: found by hand, shown on ``docs/zoo.md`` beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping

UNKNOWN = "Not taken apart."
CAUSES: Mapping[str, str] = {
    "convnet": "The FP8 linear before the head; storage alone ends below the twin. The loss falls from 2.41 to 0.15 within "
    "the 20 steps, so a small delay is a large share.",
    "siamese": "FP8 linears: linears alone +1.2 and +2.0%, storage alone -0.1%. With the last linear in `linear_skip` the "
    "gap is 0.8%.",
    "swinv2": f"{UNKNOWN} Its attention multiplies cosines by a learnt factor of 10 or more. The loss is lower than the "
    'twin\'s, as that of "off" is.',
    "mobilevit": 'It does not learn in these steps: all losses stay at 2.30. Its gradients are rounding: those of "off", '
    "which encodes nothing, are as far off as -0.0 dB.",
    "resnet_hf": "At the edge of what is judged: BF16 itself is at 10.1 dB there.",
    "wavlm": f"{UNKNOWN} One parameter, 0.6 dB below the bar.",
    "deberta_v2": f"{UNKNOWN} One bias of keys.",
    "funnel": UNKNOWN,
    "blenderbot": f"{UNKNOWN} Keys of the attention between decoder and encoder.",
    "opt": f"{UNKNOWN} One weight of keys, 0.2 dB below the bar.",
}
