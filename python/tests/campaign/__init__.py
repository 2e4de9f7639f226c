"""A campaign over models, wrappers, optimizers, options and world sizes, against an oracle of its own.

A case is made of a seed alone. It builds a model in one layout, trains it, saves it by one road, builds it again in another layout on
another number of ranks, loads it by another road, and compares every element with what was there before. The oracle gathers elements by
hand: neither reshard nor PyTorch's state-dict calls have a part in it. A case that fails is made smaller as long as it still fails.

    cd python/tests && python -m campaign --seed 0 --count 100
    cd python/tests && python -m campaign --minutes 60
    cd python/tests && python -m campaign --case '{...}'    # what a failure prints
"""
