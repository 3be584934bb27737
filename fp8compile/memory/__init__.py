"""What is not kept on the device: it is computed again (``memory.budget``), or waits on the host (``memory.offload``); and
what never exists as a whole (``memory.chunk_logits``).

repeatable   which values of the forward the backward can make again, from which others
frontier     what to give up, one value after the other, by bytes per microsecond; and which state fits the budget
timeline     the most bytes alive at one time, for the graphs as they would be
fitting      what is left of a card for forward and backward
placing      the copies in the backward, each directly before what reads it first

link         which codes go to the host, and when they go and come back
moving       the copies to the host and back, and what orders them on a GPU

chunked_*    logits chunk by chunk: statistics of their rows, sums that their gradient needs, its columns, a gathered entry's
"""
