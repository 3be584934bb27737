"""What the backward computes again so that a step stays within a budget of memory (``Recipe.memory_budget``).

repeatable   which values of the forward the backward can make again, from which others
frontier     what to give up, one value after the other, by bytes per microsecond; and which state fits the budget
timeline     the most bytes alive at one time, for the graphs as they would be
fitting      what is left of a card for forward and backward
placing      the copies in the backward, each directly before what reads it first
"""
