"""What a saved value may be stored as: a code, only if every way from it to a gradient answers small errors with small ones.

    code --decode--> v' with |v' - v| <= e S(v)  --operation by operation-->  gradient with |g' - g| <= k e S(g)

S is the magnitude of a value: for a sum, the sum of the magnitudes of what is added up. (A sum that cancels has a larger
error relative to what is left. In a dtype that is a share of each element, in a code of the largest of its group: so what a
norm centres and divides is not followed by S. Such a value is stored itself, about its statistics: analysis/norms.py.)
k, the amplification, follows from the operations in between, each on a list with its argument (responses.py). If an operation
is not on the list, the value stays exact, and the report names it. So a value needs an argument to be stored in one
byte; there is no list of dangers that could lack one.

Where a bound needs to know how large a value is (exp, sin, a pole), the range analysis has to prove it (analysis/ranges).
Two more things are followed beside k:

  gain     the product of constants on the way. tanh(1000 x) lives within |x| < 0.001, which INT8 rounds to 0, or to a group's
           254th; E4M3 keeps such values relatively exact, as long as nothing was added on the way (``shifted``).
  steps    a comparison differs only where its two sides are nearer than the error: the gradient there is that of a point no
           farther away than the error, one-sided derivatives at a kink. That holds if what the comparison chooses between is
           regular: not made by a pole or an exponential that the other choice protects from (``where(x > 0, log(x), 0)``),
           and, beside an edge other than 0, not what a maximum chose (``x == amax(x)``), which may be all at that edge, nor
           is the edge itself a maximum (``x >= amax(x)``).
"""

from fp8compile.analysis.sensitivity.analysis import OF_A_CODE, Sensitivity
from fp8compile.analysis.sensitivity.error import Error, Unbounded, error_of

__all__ = ["OF_A_CODE", "Error", "Sensitivity", "Unbounded", "error_of"]
