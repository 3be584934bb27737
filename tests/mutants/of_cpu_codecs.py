"""Faults in codecs that a CPU calls: which calls of a graph are one, and what the C++ computes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CALLS, CODECS = ("tests/passes/test_call_codecs.py",), ("tests/fx/test_cpu_codecs.py",)
CPP = "fp8compile/fx/cpu_codecs.cpp"

CPU_CODECS = (
    Mutant(
        "call_codecs: scales of columns are taken for scales of rows",
        "passes/call_codecs.py",
        " and value.shape[-1:] in ((), (1,))",
        "",
        CALLS,
    ),
    Mutant(
        "call_codecs: values in another order than their memory's are coded",
        "passes/call_codecs.py",
        ' and node.meta["val"].is_contiguous()',
        "",
        CALLS,
    ),
    Mutant(
        "call_codecs: a scale's reciprocal is taken for the scale",
        "passes/call_codecs.py",
        'return part if made.target is aten.where.self else ""',
        "return part",
        CALLS,
    ),
    Mutant(
        "call_codecs: what codecs compute of a value of their own is put into memory",
        "passes/call_codecs.py",
        " and SPLICED not in storage_root(operands[0]).meta",
        "",
        CALLS,
    ),
    Mutant(
        "call_codecs: the largest value is decoded as a whole", "passes/call_codecs.py", " <= most]", " >= 0]", CALLS
    ),
    Mutant(
        "call_codecs: operations of neighbouring calls are one call",
        "passes/call_codecs.py",
        " and operand.meta[CODEC_CALL] is call",
        "",
        CALLS,
    ),
    Mutant(
        "call_codecs: an input that was saved is an operation of its call",
        "passes/call_codecs.py",
        ' or node.op != "call_function"',
        "",
        CALLS,
    ),
    Mutant("a scale in C++ is rounded half down", CPP, "+ 0x8000)", "+ 0x7fff)", CODECS),
    Mutant("codes in C++ do not saturate", CPP, "as_bits(within(x, max))", "as_bits(x)", CODECS),
    Mutant(
        "a subnormal code in C++ is a normal one", CPP, "bits < normal ? small", "bits < normal / 2 ? small", CODECS
    ),
    Mutant("what is decoded in C++ overflows", CPP, "return value > limit ? limit : value;", "return value;", CODECS),
    Mutant(
        "an infinite amax in C++ has a scale",
        CPP,
        "amax < std::numeric_limits",
        "amax <= std::numeric_limits",
        CODECS,
    ),
    Mutant(
        "a C++ compiler of another release is taken for one that was seen to be wrong",
        "fp8compile/compiler/cpu_vectors.py",
        '"gcc version 12.2."',
        '"gcc version 12."',
        ("tests/compiler/test_cpu_vectors.py",),
    ),
)
