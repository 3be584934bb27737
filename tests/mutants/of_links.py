"""Faults in links of a pipeline that send codes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CHANGES = ("tests/numerics/test_message_changes.py",)
WIRE = ("tests/numerics/test_wire_codes.py",)
MESSAGES = ("tests/extras/links/test_sample_messages.py",)
ENDS = ("tests/extras/links/test_links.py",)
RANKS = ("tests/extras/links/test_pipelining.py",)

LINKS = (
    Mutant(
        "links: an overflow is remembered",
        "fp8compile/numerics/message_changes.py",
        "return received, torch.where(received.isfinite(), received, m)",
        "return received, received",
        CHANGES,
    ),
    Mutant(
        "links: the error of a change is carried on",
        "fp8compile/numerics/message_changes.py",
        "received = m.float() + d\n",
        "received = m.float() + 0.75 * d\n",
        CHANGES,
    ),
    Mutant(
        "links: a checksum does not know whose rows it sums",
        "fp8compile/numerics/message_changes.py",
        "_mixed(samples, places[: len(samples)] + 1).sum()",
        "samples.sum()",
        CHANGES,
    ),
    Mutant(
        "links: scales of eight bits stand behind the codes",
        "fp8compile/numerics/wire_codes.py",
        "torch.cat([_bytes(inv_scale), _bytes(codes)])",
        "torch.cat([_bytes(codes), _bytes(inv_scale)])",
        WIRE,
    ),
    Mutant(
        "links: sixteen bits of FP16 are BF16",
        "fp8compile/numerics/wire_codes.py",
        "return torch.float16 if dtype == torch.float16 else torch.bfloat16",
        "return torch.bfloat16",
        WIRE,
    ),
    Mutant(
        "links: a slab begins one row late",
        "fp8compile/extras/links/sample_messages.py",
        "if place >= len(self._slabs) * self._rows_of_slab:",
        "if place > len(self._slabs) * self._rows_of_slab:",
        MESSAGES,
    ),
    Mutant(
        "links: a state that cannot be loaded has emptied the messages",
        "fp8compile/extras/links/sample_messages.py",
        '        ids: Any = state.get("ids")\n',
        '        self.__init__()  # type: ignore[misc]\n        ids: Any = state.get("ids")\n',
        MESSAGES,
    ),
    Mutant(
        "links: the sender remembers the activation itself",
        "fp8compile/extras/links/link_ends.py",
        "        self._take(wire, x, ids)\n",
        "        self.kept.write(ids, started(x, sixteen(x.dtype)))\n",
        ENDS,
    ),
    Mutant(
        "links: changes are read from the beginning of a message",
        "fp8compile/extras/links/link_ends.py",
        "changes = wire[head : head + _nbytes(self.code, known, like)]",
        "changes = wire[: _nbytes(self.code, known, like)]",
        ENDS,
    ),
    Mutant(
        "links: samples of an evaluation are remembered",
        "fp8compile/extras/links/link_ends.py",
        "        if ids is None:\n            return self.first.packed(x)\n",
        "        ids = ids or [*range(len(x))]\n",
        ENDS,
    ),
    Mutant(
        "links: every micro-batch has the ids of the first",
        "fp8compile/extras/links/links.py",
        "ids = self._ids[chunk * rows : (chunk + 1) * rows]",
        "ids = self._ids[:rows]",
        ENDS,
    ),
    Mutant(
        "links: ids serve a second step",
        "fp8compile/extras/links/links.py",
        "            self._used.add((side, chunk))\n",
        "            pass\n",
        ENDS,
    ),
    Mutant(
        "links: a batch may have more ids than rows",
        "fp8compile/extras/links/links.py",
        "if not ids or len(ids) != rows or batch not in (0, len(self._ids)):",
        "if not ids or len(ids) != rows:",
        ENDS,
    ),
    Mutant(
        "links: codes are decoded before they have come",
        "fp8compile/extras/links/links.py",
        "self._expected.pop((direction, chunk), ())",
        "self._expected.pop((direction, chunk + 1), ())",
        RANKS,
    ),
    Mutant(
        "links: gradients take the bits of activations",
        "fp8compile/extras/links/pipelining.py",
        "DirectEnd(WireCode(backward_bits, group_size))",
        "DirectEnd(code)",
        ENDS,
    ),
)
