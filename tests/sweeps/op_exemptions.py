"""Cases of the databases of operators and modules that miss the bar and are right to: each is argued, none a blanket one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.sweeps.op_database import BAD, Record


@dataclass(frozen=True)
class Exemption:
    """Cases by regular expressions on the record's key ("op dtype sample wrapper") and the outcome that they may have."""

    cases: str
    outcome: str
    reason: str

    def names(self, record: Record) -> bool:
        return re.fullmatch(self.cases, record.key) is not None

    def covers(self, record: Record) -> bool:
        return record.outcome == self.outcome and self.names(record)


EXEMPT: tuple[Exemption, ...] = (
    Exemption(
        r"corrcoef (float32|bfloat16|float16) \d product",
        "wrong",
        "the samples hold two observations of each variable: every correlation is 1 or -1 whatever they are, its gradient 0, "
        "and both sides are rounding noise (eager's is 166 dB above float64's)",
    ),
    Exemption(
        r"nn.functional.hardsigmoid (float32|bfloat16) 0 sum",
        "wrong",
        "2 of the 196 elements within the window of +-3 lie nearer to an edge than INT8's error, at -3.001 and -2.979 in "
        "groups of amax 9: 19.9 dB where 22 are expected",
    ),
    Exemption(
        r"nn.MultiheadAttention float32 [12] product",
        "wrong",
        "three heads of one number: rows of fewer than 16 share a group, and the gradient of bias_k, one of five keys, is a "
        "sum of nine products that cancels to a tenth: 14.3 and 8.2 dB; heads of 16 and 32 give it 20 to 24, as the others",
    ),
    Exemption(
        r"nn.GaussianNLLLoss float32 0 product",
        "wrong",
        "the gradient of w1 is variance times 1/variance: 99.9 % of it is one variance, 110 times smaller than its group's "
        "largest, whose INT8 code is 13.5 % off; the gradients that are functions of the variance are exact (57 dB)",
    ),
    Exemption(
        r"nn.LocalResponseNorm float32 0 product",
        "wrong",
        "a window of one channel with alpha 1: 1 - x²/(2 + x²) leaves 7 % of numbers in E4M3, whose codes are 6 % off: 11.2 "
        "dB; with a window of 5 and torch's defaults every gradient is at 29 dB or more",
    ),
    Exemption(
        r"nn.PReLU float32 2 product",
        "wrong",
        "one slope for all: a sum of 13 numbers of either sign, 0.7 where their squares' root is 2.4, in E4M3 as what is "
        "compared with zero: 15.6 dB",
    ),
    Exemption(
        r"nn.TransformerEncoderLayer float32 (0 (sum|product)|5 product)",
        "wrong",
        "heads of two numbers from inputs of up to 9: logits reach 27 and 43, codes of query and key move one by up to 0.6 "
        "and 0.7, and softmax is nearly one-hot: 16.6, 14.9 and 12.9 dB in what lies before it. At widths of 16 and 64 with "
        "Gaussian inputs the worst gradient with storage alone is at 31 dB or more",
    ),
    Exemption(
        r"nn.TransformerEncoder float32 (0 (sum|product)|5 product)",
        "wrong",
        "as its layer: logits of the first layer reach 27 and 43, the larger weight of two is 0.93 and 0.97 on average: "
        "16.9, 16.9 and 13.2 dB in its query and key. At widths of 16 and 64 with Gaussian inputs: 32.6 dB or more",
    ),
    Exemption(
        r"nn.TransformerDecoderLayer float32 [125] product",
        "wrong",
        "heads of two numbers, of a memory of up to 9: three keys and values reach 7 and 10, and what the query's gradient "
        "takes from their differences, summed over six tokens, is 15.7 dB in norm2.weight (0.16 beside 9.4 of out_proj) and "
        "17.0 in a bias; in the fifth, self-attention's weights are 0.97 on average: 13.6. Widths of 16 and 64: 32.6 or more",
    ),
)


def unexcused(found: list[Record]) -> list[Record]:
    """What must not be, and no exemption argues for."""
    return [r for r in found if r.outcome in BAD and not any(e.covers(r) for e in EXEMPT)]


def unused(found: list[Record]) -> list[str]:
    """The exemptions for cases that ran here and of which none needs one."""
    ran = [e for e in EXEMPT if any(map(e.names, found))]
    return [e.cases for e in ran if not any(map(e.covers, found))]
